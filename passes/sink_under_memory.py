"""Wait for each collective late enough that it is hidden, within the memory limit.

    rs = reduce_scatter(%g) @dp : 80us; %s = wait(rs); %h = kernel(%x) : 100us; %y = kernel(%h)
 -> rs = reduce_scatter(%g) @dp : 80us; %h = kernel(%x) : 100us; %s = wait(rs); %y = kernel(%h)

The mirror image of `raise_under_memory`, by the same rules (`walk.py`): visits the waits from the last to the first and
moves each down as far as pays off. Cheap work on the result (views, the scaling of a scattered gradient) moves with it.
This pass moves only waits of exposed collectives; `sink_waits` also those of hidden ones, if memory has room anyway.

Keeps: data dependences, the order of starts, the memory limit.
"""

from __future__ import annotations

from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.walk import Direction, walk_in_rounds
from overlapc.schedule.model import Schedule


@register_pass("sink_under_memory")
def sink_under_memory(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Sink waits in rounds, each judged by the simulator; see the module docstring."""
    return walk_in_rounds("sink_under_memory", schedule, ctx, Direction.LATER)
