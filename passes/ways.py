"""The default passes: several ways to the end, of which the simulator picks one.

No rule here is best everywhere: on captured steps moving compute under collectives first saves up to 4% of a step or
costs 1% of it, and starting gathers twice as far ahead saves up to 5% or costs 4%. So each of `pipeline.WAYS` is tried
on what `pipeline.FIRST` made, and the one that ends fastest is kept: for collectives that take what is estimated and
for late ones together. A way that leaves next to nothing exposed ends the search.
"""

from __future__ import annotations

import dataclasses

from overlapc.passes.base import Context, PassReport, run_passes, select
from overlapc.passes.pipeline import FIRST, WAYS, Way
from overlapc.schedule.model import Estimate, Schedule

# Less exposed than this share of the step, and no other way is tried: they cost as much time as the first.
GOOD_ENOUGH = 0.01


def run_ways(schedule: Schedule, ctx: Context) -> tuple[Schedule, tuple[PassReport, ...]]:
    """What the best way made of `schedule`, and the reports of the passes on it."""
    quiet = dataclasses.replace(ctx, dump=None, stop_after=None)
    begun, first = run_passes(schedule, quiet, select(FIRST))
    best: tuple[float, Way, Schedule, tuple[PassReport, ...]] | None = None
    for way in WAYS:
        ended, reports = run_passes(begun, _on(way, quiet), select(way.passes))
        cost_ns = _cost_ns(ended, ctx)
        if best is None or cost_ns < best[0]:
            best = cost_ns, way, ended, reports
        timeline = ctx.timeline(ended)
        if timeline.exposed_ns <= GOOD_ENOUGH * timeline.step_ns:
            break
    assert best is not None
    _, way, ended, reports = best
    if ctx.dump is not None or ctx.stop_after is not None:  # asked for by the passes of the way that was chosen
        return run_passes(schedule, _on(way, ctx), select((*FIRST, *way.passes)))
    return ended, (*first, *reports)


def _on(way: Way, ctx: Context) -> Context:
    return dataclasses.replace(ctx, overlap_margin=ctx.overlap_margin * way.margin)


def _cost_ns(schedule: Schedule, ctx: Context) -> float:
    """The step if collectives take their estimate, and if they take `Context.overlap_margin` times as long."""
    late = {
        node.name: Estimate(node.estimate.ns * ctx.overlap_margin, node.estimate.source)
        for node in schedule.nodes
        if node.comm is not None and node.estimate is not None
    }
    return ctx.timeline(schedule).step_ns + ctx.timeline(schedule.with_estimates(late)).step_ns
