"""The data of a page's timeline: whole steps of every rank, before and after the passes and as measured."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from overlapc.graph_names import is_backward
from overlapc.report.model import KINDS, GraphRecord, Plan, Span, StepRecord
from overlapc.report.parsed_schedules import schedule_of
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Node, Schedule
from overlapc.units import human_bytes

_POINTS = 2000  # points of the memory curve of one graph
_HELD = 12  # rows of buffers at the peak that are listed
_NUMBER = re.compile(r"_\d+$")  # the suffix with which FX distinguishes nodes of the same op
_LAYER = re.compile(r"\.\d+(?=\.|$)")

Data = dict[str, Any]


def page_data(steps: Sequence[StepRecord]) -> Data:
    """Return the data of every rank; a rank whose data equal those of an earlier rank has only a reference to it."""
    ranks: list[Data] = []
    for step in steps:
        data = {"orders": _orders(step), "nodes": _nodes(step), "peak": _peak(step)}
        same = next((at for at, other in enumerate(ranks) if other["data"] == data), None)
        ranks.append({"rank": step.rank, "same": same, "data": data if same is None else None})
    return {"kinds": KINDS, "ranks": ranks}


def sequence(step: StepRecord) -> list[GraphRecord]:
    """Return the graphs of one step in the order of its calls.

    For each micro-batch the forwards, then their backwards in reverse order; at the end the compiled optimizers.
    """
    called = step.called
    updates = [graph for graph, times in called for _ in range(times) if graph.infers and graph.changes_inputs]
    found: list[GraphRecord] = []
    for turn in range(max((times for _, times in called), default=0)):
        due = [graph for graph, times in called if times > turn and graph not in updates]
        found += [graph for graph in due if not is_backward(graph.name)]
        found += [graph for graph in reversed(due) if is_backward(graph.name)]
    return found + updates


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Return the lanes of the spans: compute first, then the queues by name."""
    return sorted({span.lane for span in spans}, key=lambda lane: (lane != "compute", lane))


def _orders(step: StepRecord) -> Data:
    graphs = sequence(step)
    orders = {
        "before": _order([(graph, graph.before, graph.memory_before) for graph in graphs]),
        "after": _order([(graph, graph.after, graph.memory) for graph in graphs]),
    }
    measured = [(graph, Plan(graph.measured.step_ns, graph.measured.spans), ()) for graph in graphs if graph.measured]
    if measured and len(measured) == len(graphs) and all(plan.spans for _, plan, _ in measured):
        orders["measured"] = _order(measured)
    return orders


def _order(plans: Sequence[tuple[GraphRecord, Plan, Sequence[tuple[float, int]]]]) -> Data:
    """Return one order of a step: its graphs one after the other, with their live memory where it is known.

    A span is [lane, kind, begin in ns, end in ns, node]; the node of an idle span is the collective waited for.
    """
    lanes = lanes_of(span for _, plan, _ in plans for span in plan.spans)
    spans: list[list[Any]] = []
    points: list[tuple[int, int]] = []
    borders: list[tuple[int, str]] = []
    offset_ns = 0.0
    for graph, plan, memory in plans:
        borders.append((round(offset_ns), graph.name))
        for span in plan.spans:
            if span.end_ns > span.start_ns:
                begin, end = round(offset_ns + span.start_ns), round(offset_ns + span.end_ns)
                spans.append([lanes.index(span.lane), KINDS.index(span.kind), begin, end, f"{graph.name}/{span.node}"])
        points += [(round(offset_ns + at_ns), size) for at_ns, size in thinned(memory)]
        offset_ns += plan.step_ns
    data: Data = {"end": round(offset_ns), "lanes": lanes, "spans": spans, "borders": borders}
    return {**data, "memory": points} if points else data


def thinned(memory: Sequence[tuple[float, int]]) -> Iterator[tuple[float, int]]:
    """Yield at most `_POINTS` points: of each stretch the highest one, so that the peak is drawn."""
    stride = max(1, -(-len(memory) // _POINTS))
    for start in range(0, len(memory), stride):
        yield max(memory[start : start + stride], key=lambda point: point[1])


def _nodes(step: StepRecord) -> Data:
    """Return the facts that a click on a node shows, by "graph/node"."""
    found: Data = {}
    for graph, _ in step.called:
        facts = {
            row.name: {
                "what": f"{row.op} of {human_bytes(row.bytes)}",
                "of": row.origin,
                "group": f"@{row.group}, {row.ranks} ranks",
                "limit": row.limit,
                "by": row.source,
            }
            for row in graph.collectives
        }
        for node in schedule_of(graph).nodes:
            known = {"what": _what(node), "of": node.origin.module, "line": node.origin.source}
            by = {} if node.estimate is None else {"by": node.estimate.source}
            facts[node.name] = {**known, **by, **facts.get(node.name, {})}
        for name, known in facts.items():
            found[f"{graph.name}/{name}"] = {key: value for key, value in known.items() if value}
    return found


def _live(schedule: Schedule, at: int) -> dict[str, int]:
    """Return the storages that are live while the node at position `at` runs, with their bytes."""
    made: dict[str, int] = {}
    for position, node in enumerate(schedule.nodes):
        for name in node.writes:
            made.setdefault(schedule.root(name), position)
    last = analyze(schedule).last_touch
    roots = {schedule.root(name): None for name in schedule.buffers}
    return {
        root: schedule.buffers[root].bytes
        for root in roots
        if schedule.buffers[root].bytes and made.get(root, -1) <= at <= last.get(root, len(schedule.nodes))
    }


def _makers(schedule: Schedule, roots: Container[str]) -> dict[str, str]:
    """Return storage -> the module or line that writes it first; for an input, the one that reads it first."""
    found = dict.fromkeys(map(schedule.root, schedule.buffers), "")
    for node in schedule.nodes:
        place, colon, code = node.origin.source.partition(": ")
        maker = node.origin.module or (f"{PurePath(place).name}{colon}{code}" if place else "")
        for root in map(schedule.root, (*node.writes, *node.reads)) if maker else ():
            if root in roots and not found[root]:
                found[root] = maker
    return found


def _what(node: Node) -> str:
    if node.work is None:
        return node.op
    moved = human_bytes(node.work.read_bytes + node.work.write_bytes)
    return f"{node.op}, {node.work.flops / 1e9:.3g} GFLOP, {moved}" if node.work.flops else f"{node.op}, {moved}"


def _peak(step: StepRecord) -> Data:
    """Return the graph with the highest peak memory, with the node at the peak, the budget, and the live buffers."""
    graphs = [graph for graph, _ in step.called]
    if not graphs:
        return {}
    graph = max(graphs, key=lambda each: each.peak_bytes)
    schedule = schedule_of(graph)
    memory = analyze(schedule)
    at = memory.peak_at
    live = {} if at is None else _live(schedule, at)
    held = _alike(live, _makers(schedule, live))
    return {
        "graph": graph.name,
        "bytes": graph.peak_bytes,
        "budget": graph.budget_bytes,
        "node": "" if at is None else schedule.nodes[at].name,
        "held": [[name, of, human_bytes(size)] for name, of, size in held[:_HELD]],
        "more": max(0, len(held) - _HELD),
        "rest": human_bytes(sum(size for _, _, size in held[_HELD:])),
    }


def _alike(live: Mapping[str, int], makers: Mapping[str, str]) -> list[tuple[str, str, int]]:
    """Return (name, module or line, bytes) of live buffers, largest first.

    Buffers of the same op in the same module of several layers are one entry.
    """
    groups: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in live:
        groups[_NUMBER.sub("", name), _LAYER.sub(".*", makers[name])].append(name)
    found = []
    for (op, whose), names in groups.items():
        first, several = names[0], len(names) > 1
        shown = f"{len(names)} x {op}" if several else first
        found.append((shown, whose if several else makers[first], sum(live[name] for name in names)))
    return sorted(found, key=lambda each: -each[2])
