"""The schedules of a run in one file, with the machine and the calls that the simulator needs to repeat the figures.

    schedule forward_0
    ...
    # machine {"graphs": ["forward_0", "backward_0"], "profile": {...}}
    # step {"world_size": 8, "calls": {"forward_0": 2, "backward_0": 2}}

Times of nodes are the estimators' times at full load; the simulator derives the clock of an order from them. For the
parser of schedules the last lines are comments.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from overlapc import documents
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.profiles.profile_file import profile_from_json
from overlapc.report.model import Count, GraphRecord, StepRecord
from overlapc.report.parsed_schedules import schedule_of

_LINE = re.compile(r"^# (machine|step) (\{.*\})[ \t]*\r?$", re.MULTILINE)


@dataclass(frozen=True)
class SavedContext:
    """What a file of schedules contains besides the schedules."""

    profiles: Mapping[str, DeviceProfile]  # by graph
    calls: Mapping[str, int]  # graph -> number of calls in one step
    world_size: int = 1


class _Machine(msgspec.Struct):
    graphs: tuple[str, ...]
    profile: dict[str, Any]


class _Step(msgspec.Struct):
    world_size: Count = 1
    calls: dict[str, Count] = {}


def render(steps: Sequence[StepRecord]) -> str:
    """Return the final schedules of the first rank, in the format that `overlapc plan` reads."""
    if not steps:
        return "\n"
    (first, *_) = steps
    return "\n\n".join([*(_text(graph).rstrip() for graph in first.graphs), "\n".join(_lines(first))]) + "\n"


def _text(graph: GraphRecord) -> str:
    """Return a graph's schedule with times at full load, and with the modules of its buckets, which only rows have."""
    whose = {row.name: row.origin for row in graph.collectives if " to " in row.origin}
    if not graph.full_load_ns and not whose:
        return graph.schedule
    schedule = schedule_of(graph)
    known = {node.name: node.estimate for node in schedule.nodes if node.estimate is not None}
    schedule = schedule.with_estimates({name: replace(known[name], ns=ns) for name, ns in graph.full_load_ns.items()})
    nodes = (
        replace(node, origin=replace(node.origin, module=whose[node.name])) if node.name in whose else node
        for node in schedule.nodes
    )
    return str(replace(schedule, nodes=tuple(nodes)))


def _lines(step: StepRecord) -> Iterator[str]:
    graphs: dict[str, list[str]] = {}
    for graph in step.graphs:
        if graph.profile:
            graphs.setdefault(graph.profile, []).append(graph.name)
    for profile, names in graphs.items():
        yield f'# machine {{"graphs": {json.dumps(names)}, "profile": {profile}}}'
    calls = {graph.name: times for graph, times in step.called}
    yield f"# step {json.dumps({'world_size': step.world_size, 'calls': calls})}"


def saved_context(text: str) -> SavedContext:
    """Read the lines that `render` wrote after the schedules, if any. Raise ConfigError if such a line is malformed."""
    profiles: dict[str, DeviceProfile] = {}
    step = _Step()
    for what, content in _LINE.findall(text):
        problem = f"the line `# {what}` after the schedules is malformed"
        if what == "step":
            step = documents.from_json(content, _Step, problem)
            continue
        machine = documents.from_json(content, _Machine, problem)
        profiles.update(dict.fromkeys(machine.graphs, profile_from_json(machine.profile, problem)))
    return SavedContext(profiles, step.calls, max(1, step.world_size))
