"""The schedules of a run in one file, with what the simulator needs to reproduce the figures.

    schedule forward_0
    ...
    # machine {"graphs": ["forward_0", "backward_0"], "profile": {...}}
    # step {"world_size": 8, "calls": {"forward_0": 2, "backward_0": 2}}

Times of nodes are those of full load, as estimators gave them: the simulator goes from there to the clock that an order
leads to. To the parser of a schedule the last lines are comments.
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
from overlapc.schedule.text import parse

_LINE = re.compile(r"^# (machine|step) (\{.*\})[ \t]*\r?$", re.MULTILINE)


@dataclass(frozen=True)
class Kept:
    """What a file of schedules holds beside them."""

    profiles: Mapping[str, DeviceProfile]  # by graph
    calls: Mapping[str, int]  # graph -> in one step
    world_size: int = 1


class _Machine(msgspec.Struct):
    graphs: tuple[str, ...]
    profile: dict[str, Any]


class _Step(msgspec.Struct):
    world_size: Count = 1
    calls: dict[str, Count] = {}


def render(steps: Sequence[StepRecord]) -> str:
    """The final schedules of the first rank, as `overlapc plan` reads them back."""
    if not steps:
        return "\n"
    (first, *_) = steps
    return "\n\n".join([*(_text(graph).rstrip() for graph in first.graphs), "\n".join(_lines(first))]) + "\n"


def _text(graph: GraphRecord) -> str:
    """With times of full load, and what each collective is of, which of a bucket only the record knows."""
    whose = {row.name: row.origin for row in graph.collectives if " to " in row.origin}
    if not graph.full_load_ns and not whose:
        return graph.schedule
    schedule = parse(graph.schedule)
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


def kept(text: str) -> Kept:
    """What `render` wrote behind the schedules of a file, if it did. ConfigError for lines that it would not write."""
    profiles: dict[str, DeviceProfile] = {}
    step = _Step()
    for what, content in _LINE.findall(text):
        problem = f"the schedules' line `# {what}` is not as overlapc writes it"
        if what == "step":
            step = documents.from_json(content, _Step, problem)
            continue
        machine = documents.from_json(content, _Machine, problem)
        profiles.update(dict.fromkeys(machine.graphs, profile_from_json(machine.profile, problem)))
    return Kept(profiles, step.calls, max(1, step.world_size))
