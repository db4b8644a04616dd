"""Builds the `GraphRecord` of a compiled graph from the result of the pass pipeline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from overlapc.estimators.device import IDEAL, DeviceProfile
from overlapc.estimators.host import host_ns
from overlapc.estimators.profiles.profile_file import profile_to_json
from overlapc.estimators.timeline import Timeline
from overlapc.passes.records import CollectiveRecord
from overlapc.passes.run import Result
from overlapc.report.model import CollectiveRow, GraphRecord, PassRow, Plan, Span
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Kind, Origin, Schedule


def graph_record(
    result: Result,
    *,
    fallbacks: Mapping[str, int] | None = None,
    attention: Mapping[str, int] | None = None,
    compile_seconds: float = 0.0,
    budget_bytes: int | None = None,
) -> GraphRecord:
    """Return the record of one compiled graph, as plain data.

    fallbacks: number of eager calls by op, for ops without a lowering; they are not counted as library calls.
    attention: number of calls by the text that the report prints for them (kernel and reason).
    budget_bytes: the memory limit of the plan, if it is not the schedule's own.
    """
    final = result.schedule
    return GraphRecord(
        name=final.name,
        schedule=str(final),
        before=plan_of(result.before),
        after=plan_of(result.after),
        lower_bound_ns=result.after.lower_bound_ns,
        gap=_gap_of(result.after),
        peak_bytes=result.peak_bytes,
        incoming_peak_bytes=result.incoming_peak_bytes,
        budget_bytes=budget_bytes if budget_bytes is not None else final.budget_bytes,
        collectives=tuple(_row(row, result) for row in result.collectives),
        memory=memory_of(result.after),
        memory_before=memory_of(result.before),
        passes=tuple(PassRow(report.name, report.seconds, dict(report.reasons)) for report in result.reports),
        kernels=_count(final, Kind.KERNEL),
        externs=max(0, _count(final, Kind.EXTERN) - sum((fallbacks or {}).values())),
        fallbacks=dict(fallbacks or {}),
        attention=dict(attention or {}),
        unknown=result.after.unknown,
        compile_seconds=compile_seconds,
        host_ns=host_ns(final, result.after.profile),
        profile=_profile_text(result.after.profile),
        full_load_ns={
            node.name: node.estimate.ns
            for node, settled in zip(result.ordered.nodes, final.nodes, strict=True)
            if node.estimate is not None and node.estimate != settled.estimate
        },
        changes_inputs=any(final.buffers[final.root(name)].is_input for node in final.nodes for name in node.mutates),
        alone_ns=sum(node.estimate.ns for node in final.nodes if node.kind in COMPUTE and node.estimate is not None),
    )


def _profile_text(profile: DeviceProfile) -> str:
    return "" if profile is IDEAL else json.dumps(profile_to_json(profile))


def _count(schedule: Schedule, kind: Kind) -> int:
    return sum(node.kind is kind for node in schedule.nodes)


def _row(row: CollectiveRecord, result: Result) -> CollectiveRow:
    return CollectiveRow(
        name=row.name,
        op=row.op,
        group=row.group,
        ranks=row.size,
        bytes=row.bytes,
        estimate_ns=row.estimate_ns,
        source=row.source,
        hidden_before_ns=row.hidden_before_ns,
        exposed_before_ns=row.exposed_before_ns,
        hidden_after_ns=row.hidden_after_ns,
        exposed_after_ns=row.exposed_after_ns,
        moves=row.moves,
        limit=row.limit,
        via=row.via,
        causes=tuple(reason.name for reason in row.causes),
        origin=_whose(row, result),
    )


def _whose(row: CollectiveRecord, result: Result) -> str:
    """Return the module or source line of a collective; for a bucket over several modules, the first and the last."""
    members = [result.before.schedule.node(name) for name in row.members]
    units = list(dict.fromkeys(node.comm.unit for node in members if node.comm and node.comm.unit))
    return f"{units[0]} to {units[-1]}" if len(units) > 1 else shown_origin(result.schedule.node(row.name).origin)


def plan_of(timeline: Timeline) -> Plan:
    """Return the timeline as plain spans, which do not need the schedule."""
    return Plan(timeline.step_ns, tuple(_spans(timeline)))


def _spans(timeline: Timeline) -> Iterator[Span]:
    schedule = timeline.schedule
    for node, start_ns, end_ns in zip(schedule.nodes, timeline.start_ns, timeline.end_ns, strict=True):
        origin = shown_origin(node.origin)
        if node.kind in COMPUTE:
            yield Span(node.name, "compute", start_ns, end_ns, node.kind.value, origin)
        elif node.kind in COMMUNICATION:
            yield Span(node.name, f"@{node.queue or 'unknown'}", start_ns, end_ns, node.kind.value, origin)
            if node.kind is Kind.COMM:  # a blocking collective
                yield Span(node.name, "compute", start_ns, end_ns, "idle", origin)
        elif node.kind is Kind.WAIT:
            yield Span(schedule.start_of(node).name, "compute", start_ns, end_ns, "idle", origin)


def memory_of(timeline: Timeline) -> tuple[tuple[float, int], ...]:
    """Return (time in ns, live bytes) at every change of live memory, in the order of the compute stream."""
    points: list[tuple[float, int]] = []
    clock_ns = 0.0
    schedule = timeline.schedule
    during_bytes = analyze(schedule).during_bytes
    for node, start_ns, end_ns, size_bytes in zip(
        schedule.nodes, timeline.start_ns, timeline.end_ns, during_bytes, strict=True
    ):
        # A start allocates its result when it is issued, which is before the collective runs on its queue.
        time_ns = clock_ns if node.kind is Kind.START else start_ns
        if not points or points[-1][1] != size_bytes:
            points.append((time_ns, size_bytes))
        if node.kind is not Kind.START:
            clock_ns = max(clock_ns, end_ns)
    return tuple(points)


def shown_origin(origin: Origin) -> str:
    """Return the module path, else the source line, else ""."""
    return origin.module or origin.source


def _gap_of(timeline: Timeline) -> dict[str, float]:
    gap = timeline.gap
    return {
        "compute slowed by communication": gap.contention_ns,
        "exposed": gap.exposed_ns,
        "idle": gap.idle_ns,
    }
