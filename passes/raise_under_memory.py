"""Start each collective early enough to be hidden, within the memory limit.

    %h = kernel(%x) : 100us; ag0 = all_gather(%p0) @dp : 80us; %w0 = wait(ag0); %y = kernel(%h, %w0)
 -> ag0 = all_gather(%p0) @dp : 80us; %h = kernel(%x) : 100us; %w0 = wait(ag0); %y = kernel(%h, %w0)

Goes over the collectives from the first to the last and moves each start up as far as pays; `walk.py` has the rules.
A start without an estimate is never known to be hidden: it moves up as far as the other reasons allow.

Where `Context.reorder_collectives` allows it, a start also passes an earlier, independent one of its group if that
exposes less in all: in an FSDP backward every gather stands behind the scatter of the layer before, and can
only be prefetched past it. Ranks have to agree on the final order then, as they do when it is compared.

Keeps: data dependences, the memory limit, and otherwise the order of collectives on each process group.
"""

from __future__ import annotations

from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.walk import Direction, walk_in_rounds
from overlapc.schedule.model import Schedule


@register_pass("raise_under_memory")
def raise_under_memory(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Rounds of raising, each judged by the simulator; see the module."""
    return walk_in_rounds("raise_under_memory", schedule, ctx, Direction.EARLIER)
