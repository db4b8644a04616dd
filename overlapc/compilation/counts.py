"""What a compiled graph adds to `torch._dynamo.utils.counters["overlapc"]`."""

from __future__ import annotations

from collections import Counter

from overlapc.fusion.to_schedule import op_name
from overlapc.ir.ops import Extern, Start
from overlapc.passes.run import Result
from overlapc.schedule.model import Kind


def fallbacks_of(result: Result) -> dict[str, int]:
    """Return the number of calls of each op that has no lowering."""
    found: Counter[str] = Counter()
    for node in result.schedule.nodes:
        op = node.payload.call if isinstance(node.payload, Start) else node.payload
        if isinstance(op, Extern) and op.fallback:
            found[op_name(op.target)] += 1
    return dict(found)


def counts_of(result: Result) -> dict[str, int]:
    """Return what one compiled graph adds to `counters["overlapc"]`."""
    kinds = Counter(node.kind for node in result.schedule.nodes)
    fused = sum(node.kind is Kind.KERNEL for node in result.before.schedule.nodes)
    fallbacks = fallbacks_of(result)
    return {
        "graphs": 1,
        "kernels": kinds[Kind.KERNEL],
        "kernels_sharing": fused - kinds[Kind.KERNEL],  # kernels that passes merged into the launches of others
        "externs": kinds[Kind.EXTERN] - sum(fallbacks.values()),
        "collectives": kinds[Kind.START] + kinds[Kind.COMM],
        "fallbacks": sum(fallbacks.values()),
        **{f"fallback {name}": times for name, times in fallbacks.items()},
    }
