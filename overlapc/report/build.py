"""From what the pass pipeline hands back to a `GraphRecord`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from overlapc.estimators.timeline import Timeline
from overlapc.report.record import Plan, Span
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Kind, Node, Origin, Schedule
from overlapc.schedule.text import print_schedule


def plan_of(timeline: Timeline) -> Plan:
    """What ran where and when, as spans that no longer need the schedule."""
    return Plan(timeline.step_ns, tuple(_spans(timeline)))


def _spans(timeline: Timeline) -> Iterator[Span]:
    schedule = timeline.schedule
    for node, start_ns, end_ns in zip(schedule.nodes, timeline.start_ns, timeline.end_ns, strict=True):
        origin = shown_origin(node.origin)
        if node.kind in (Kind.KERNEL, Kind.EXTERN):
            yield Span(node.name, "compute", start_ns, end_ns, node.kind.value, origin)
        elif node.kind in (Kind.START, Kind.COMM):
            group = node.comm.group if node.comm is not None else "unknown"
            yield Span(node.name, f"@{group}", start_ns, end_ns, node.kind.value, origin)
            if node.kind is Kind.COMM:  # which waits for itself
                yield Span(node.name, "compute", start_ns, end_ns, "idle", origin)
        elif node.kind is Kind.WAIT:
            yield Span(schedule.start_of(node).name, "compute", start_ns, end_ns, "idle", origin)


def memory_of(timeline: Timeline) -> tuple[tuple[float, int], ...]:
    """(time, live bytes) at every change of what is live, as the compute stream meets it."""
    points: list[tuple[float, int]] = []
    clock_ns = 0.0
    schedule = timeline.schedule
    during_bytes = analyze(schedule).during_bytes
    for node, start_ns, end_ns, size_bytes in zip(
        schedule.nodes, timeline.start_ns, timeline.end_ns, during_bytes, strict=True
    ):
        # A start allocates when it is issued, which is before its queue gets to it.
        time_ns = clock_ns if node.kind is Kind.START else start_ns
        if not points or points[-1][1] != size_bytes:
            points.append((time_ns, size_bytes))
        if node.kind is not Kind.START:
            clock_ns = max(clock_ns, end_ns)
    return tuple(points)


def shown_origin(origin: Origin) -> str:
    """The module path, else the source line, else nothing."""
    return origin.module or origin.source
