"""The record of a planned graph, and what it adds to `torch._dynamo.utils.counters["overlapc"]`."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from overlapc.fusion.to_schedule import op_name
from overlapc.ir.ops import Extern, Start
from overlapc.passes.run import Result
from overlapc.planning.graph_planner import Planned
from overlapc.report.graph_record import graph_record
from overlapc.report.kept_gathered import GatherChoice, with_gathers
from overlapc.report.model import GraphRecord
from overlapc.schedule.model import Kind


def record_of(result: Result, choice: GatherChoice, planned: Planned | None = None) -> GraphRecord:
    """Return the record of a graph.

    choice: the gathers that the step keeps between forward and backward. planned: where `result` comes from; None for
    schedules that were not made from an FX graph.
    """
    attention, not_copied = ({}, {}) if planned is None else (planned.attention, planned.not_copied)
    record = graph_record(result, fallbacks=_fallbacks(result), attention=attention)
    return with_gathers(replace(record, not_copied=not_copied), result, choice)


def _fallbacks(result: Result) -> dict[str, int]:
    """Return the number of calls of each op that has no lowering."""
    found: Counter[str] = Counter()
    for node in result.schedule.nodes:
        op = node.payload.call if isinstance(node.payload, Start) else node.payload
        if isinstance(op, Extern) and op.fallback:
            found[op_name(op.target)] += 1
    return dict(found)


def counts_of(result: Result, planned: Planned | None = None) -> dict[str, int]:
    """Return what one graph adds to `counters["overlapc"]`. planned: as for `record_of`."""
    kinds = Counter(node.kind for node in result.schedule.nodes)
    fused = sum(node.kind is Kind.KERNEL for node in result.before.schedule.nodes)
    fallbacks = _fallbacks(result)
    return {
        "graphs": 1,
        "kernels": kinds[Kind.KERNEL],
        "kernels_sharing": fused - kinds[Kind.KERNEL],  # kernels that passes merged into the launches of others
        "externs": kinds[Kind.EXTERN] - sum(fallbacks.values()),
        "collectives": kinds[Kind.START] + kinds[Kind.COMM],
        "fallbacks": sum(fallbacks.values()),
        **{f"fallback {name}": times for name, times in fallbacks.items()},
        **({} if planned is None else planned.attention_counts),
    }
