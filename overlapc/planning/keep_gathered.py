"""Chooses the parameters that stay gathered between forward and backward, as far as a memory budget has room for them.

    forward:   w = wait(all_gather(p)); y = kernel(x, w)         backward:  w = wait(all_gather(p)); g = kernel(d, w)
 -> forward:   w = wait(all_gather(p)); y = kernel(x, w)         backward:  g = kernel(d, w)
               w is an output                                               w is an input

The choice is made on the schedules of both graphs before the passes. All-gathers are ranked by the time per byte that
the planned backward gets shorter when it is replayed without them. The first of them are kept, as many as the budgets
of both graphs allow in program order. Prefetching needs memory too, so keeping fewer is planned as well, and the
shortest step is chosen.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial

from overlapc.codegen.copies import laid_out_bytes, peak_before, peak_with_pools
from overlapc.errors import MemoryBudgetError
from overlapc.passes.base import Context
from overlapc.passes.run import Result, run_pipeline
from overlapc.report.held_memory import held_bytes
from overlapc.report.kept_gathered import HIDDEN, NO_ROOM, NOT_SHORTER, saved_by_launch
from overlapc.schedule.gathered_inputs import given_gathered
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Buffer, Schedule

_SHARES = (1.0, 0.75, 0.5, 0.25)  # of the gathers that fit: tried in turn until one gains less
_EFFORT = 0.1  # of the search effort of final plans: plans that are only compared need not be as good


@dataclass(frozen=True)
class Step:
    """The schedules of forward and backward of one function before the passes, with the passes' contexts."""

    forward: Schedule
    backward: Schedule
    forward_ctx: Context
    backward_ctx: Context

    @classmethod
    def of(cls, forward: tuple[Schedule, Context], backward: tuple[Schedule, Context]) -> Step:
        """Return the step, with the inputs that only forward receives charged to backward's memory budget."""
        given, taken = forward[0], backward[0]
        if taken.budget_bytes is not None:
            held = held_bytes(_inputs(given), _inputs(taken))
            taken = replace(taken, budget_bytes=max(0, taken.budget_bytes - held))
        return cls(given, taken, forward[1], backward[1])

    @cached_property
    def gathered_twice(self) -> Mapping[str, int]:
        """The all-gathers of parameters that backward repeats under the same name -> bytes of their results."""
        in_forward = {start.name for start in self.forward.starts()}
        return {
            start.name: sum(self.backward.buffers[self.backward.root(name)].bytes for name in start.writes)
            for start in self.backward.starts()
            if start.name in in_forward and start.comm is not None
            if start.comm.collective == "all_gather" and start.comm.unit
        }

    def keeping(self, gathers: Collection[str]) -> Step:
        """Return this step with the results of `gathers` saved for backward instead of gathered again."""
        nodes = self.forward.nodes
        waits = (nodes[wait] for wait, start in self.forward.started.items() if nodes[start].name in gathers)
        saved = tuple(name for wait in waits for name in wait.writes)
        forward = replace(self.forward, outputs=(*self.forward.outputs, *saved), moved_from=None)
        return replace(self, forward=forward, backward=given_gathered(self.backward, gathers))

    def on_trial(self, share: float) -> Step:
        """Return this step for plans that are only compared, with a share of the search effort."""
        forward, backward = (
            replace(ctx, effort=int(ctx.effort * share), trial=True) for ctx in (self.forward_ctx, self.backward_ctx)
        )
        return replace(self, forward_ctx=forward, backward_ctx=backward)

    @property
    def fits(self) -> bool:
        """Whether both graphs fit into their memory budgets in program order."""
        graphs = ((self.forward, self.forward_ctx), (self.backward, self.backward_ctx))
        return all(
            schedule.budget_bytes is None or ctx.peak_of(schedule) <= schedule.budget_bytes for schedule, ctx in graphs
        )

    @cached_property
    def plans(self) -> tuple[Result, Result]:
        """The results of the passes on forward and backward, which share forward's shared memory for copies."""
        ctx = replace(self.forward_ctx, peak_of=partial(peak_before, beside_pools_bytes=self.beside_pools_bytes))
        forward = run_pipeline(self.forward, ctx)
        peak_of = partial(peak_with_pools, at_least_bytes=laid_out_bytes(forward.schedule))
        return forward, run_pipeline(self.backward, replace(self.backward_ctx, peak_of=peak_of))

    @property
    def beside_pools_bytes(self) -> int:
        """Peak bytes of backward outside of the shared memory for copies, with inputs that only forward received."""
        memory, budget_bytes = analyze(self.backward), self.backward.budget_bytes
        held = 0 if budget_bytes is None else (self.forward.budget_bytes or 0) - budget_bytes
        return memory.peak_bytes - memory.pool_bytes + held

    @property
    def planned_ns(self) -> float:
        """The planned time of forward and backward together; infinite if no plan fits the budget."""
        try:
            return sum(plan.after.step_ns for plan in self.plans)
        except MemoryBudgetError:
            return math.inf


def kept_gathers(step: Step, gathers: Collection[str]) -> tuple[tuple[str, ...], str]:
    """Choose the gathers whose results forward saves for backward; none if saving none is fastest.

    Return (gathers, the reason why no more).
    """
    whole, step = step.on_trial(1.0), step.on_trial(_EFFORT)
    ranked = list(_saved_ns(step, gathers))
    counts = range(1, len(ranked) + 1)
    most = bisect.bisect_left(counts, True, key=lambda count: not step.keeping(ranked[:count]).fits)
    shortest_ns, kept = step.planned_ns, 0
    for count in dict.fromkeys(int(most * share) for share in _SHARES):
        if not count:
            continue
        planned_ns = step.keeping(ranked[:count]).planned_ns
        if planned_ns < shortest_ns:
            shortest_ns, kept = planned_ns, count
        elif kept:
            break  # the larger share before was shorter
    # The final plans get the full search effort, with which keeping nothing may be the shortest after all.
    if kept and whole.planned_ns <= shortest_ns and whole.planned_ns <= whole.keeping(ranked[:kept]).planned_ns:
        kept = 0
    if kept < most:
        return tuple(ranked[:kept]), NOT_SHORTER
    return tuple(ranked[:most]), NO_ROOM if most < len(ranked) else HIDDEN


def _saved_ns(step: Step, gathers: Collection[str]) -> dict[str, float]:
    """Return how much shorter the planned backward is without each of `gathers`, ordered by time saved per byte.

    The time saved by a bucketed launch is divided among its gathers by bytes. Gathers that save nothing are left out.
    """
    backward = step.plans[1]
    found = step.gathered_twice.keys() & gathers
    saved_ns = saved_by_launch(step.backward_ctx.timeline(backward.ordered), backward.collectives, found)
    by_byte: dict[str, float] = {}
    for row in backward.collectives:
        if row.name in saved_ns:
            members = [name for name in row.members or (row.name,) if name in found]
            by_byte.update(dict.fromkeys(members, saved_ns[row.name] / row.bytes))
    ranked = sorted((name for name in by_byte if by_byte[name] > 0), key=lambda name: -by_byte[name])
    return {name: by_byte[name] * step.gathered_twice[name] for name in ranked}


def _inputs(schedule: Schedule) -> dict[str, Buffer]:
    return {name: buffer for name, buffer in schedule.buffers.items() if buffer.is_input}
