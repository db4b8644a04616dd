"""The default passes: several ways to the end, of which the simulator picks one.

No rule here is best everywhere: on captured steps moving compute under collectives first saves up to 4% of a step or
costs 1% of it, and starting gathers twice as far ahead saves up to 5% or costs 4%. So each of `pipeline.WAYS` is tried
on what `pipeline.FIRST` made, ends with `pipeline.ENDS`, and the one that costs least (`base.cost`) is kept and goes
through `pipeline.LAST`. A way that leaves next to nothing exposed ends the search, and so does their number times that
of nodes: ways take their time, while on large schedules, which repeat themselves, they differ least.
"""

from __future__ import annotations

import dataclasses

from overlapc.passes.base import Context, Pass, PassReport, cost, run_passes, select
from overlapc.passes.pipeline import ENDS, FIRST, LAST, WAYS, Way
from overlapc.schedule.model import Schedule

# Less exposed than this share of the step, and no other way is tried: they cost as much time as the first.
GOOD_ENOUGH = 0.001
# At most so many nodes in all the ways that are tried: two ways of 20,000 nodes take some seconds.
NODES_IN_ALL = 40_000


def run_ways(schedule: Schedule, ctx: Context) -> tuple[Schedule, tuple[PassReport, ...]]:
    """What the best way made of `schedule`, and the reports of the passes on it."""
    quiet = dataclasses.replace(ctx, dump=None, stop_after=None)
    begun, first = run_passes(schedule, quiet, select(FIRST))
    best: tuple[tuple[float, float], Way, Schedule, tuple[PassReport, ...]] | None = None
    for way in WAYS[: max(1, NODES_IN_ALL // max(1, len(schedule.nodes)))]:
        ended, reports = run_passes(begun, quiet, _passes(way))
        ended_cost = cost(ended, ctx)
        if best is None or ended_cost < best[0]:
            best = ended_cost, way, ended, reports
        timeline = ctx.timeline(ended)
        if timeline.exposed_ns <= GOOD_ENOUGH * timeline.step_ns:
            break
    assert best is not None
    _, way, ended, reports = best
    if ctx.dump is not None or ctx.stop_after is not None:  # asked for by the passes of the way that was chosen
        return run_passes(schedule, ctx, (*select(FIRST), *_passes(way), *select(LAST)))
    ended, last = run_passes(ended, quiet, select(LAST))
    return ended, (*first, *reports, *last)


def default_names() -> set[str]:
    """Every pass that some way of the default ones consists of. A schedule goes one of them."""
    return {*FIRST, *ENDS, *LAST, *(name for way in WAYS for name in way.passes)}


def _passes(way: Way) -> tuple[tuple[str, Pass], ...]:
    ahead = tuple((name, _with_margin(each, way.margin)) for name, each in select(way.passes))
    return (*ahead, *select(ENDS))


def _with_margin(each: Pass, margin: float) -> Pass:
    def run(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
        return each(schedule, dataclasses.replace(ctx, overlap_margin=ctx.overlap_margin * margin))

    return run
