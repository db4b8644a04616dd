"""Start each collective early enough to be hidden, within the memory limit.

    %h = kernel(%x) : 100us; ag0 = all_gather(%p0) @dp : 80us; %w0 = wait(ag0); %y = kernel(%h, %w0)
 -> ag0 = all_gather(%p0) @dp : 80us; %h = kernel(%x) : 100us; %w0 = wait(ag0); %y = kernel(%h, %w0)

Visits the collectives from the first to the last and moves each start up as far as pays off; `walk.py` has the rules.
A collective without an estimate is never known to be hidden: its start moves up as far as the other reasons allow.

Where `Context.reorder_collectives` allows it, a start also passes an earlier, independent start of its group if that
reduces the total exposed time: in an FSDP backward every gather stands behind the reduce-scatter of the layer before,
and must pass it to be prefetched. All ranks must then use the same final order, which they compare.

Keeps: data dependences, the memory limit, and otherwise the order of collectives on each process group.
"""

from __future__ import annotations

from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.walk import Direction, walk_in_rounds
from overlapc.schedule.model import Schedule


@register_pass("raise_under_memory")
def raise_under_memory(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Raise starts in rounds, each judged by the simulator; see the module docstring."""
    return walk_in_rounds("raise_under_memory", schedule, ctx, Direction.EARLIER)
