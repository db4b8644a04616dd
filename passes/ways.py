"""The default passes: several ways to the end, of which the simulator picks one.

No rule here is best everywhere: on captured steps moving compute under collectives first saves up to 4% of a step or
costs 1% of it, and starting gathers twice as far ahead saves up to 5% or costs 4%. So each of `pipeline.WAYS` is tried
on what `pipeline.FIRST` made, and ends with `pipeline.ENDS`. The ones that cost least (`judge.cost`) go through
`pipeline.LAST`, which may turn round which is the best. That one is gone once more on buckets that are cut more finely
(`pipeline.FINER`), and `judge.best` says which of the two is kept and goes through `pipeline.AFTER`. A way that leaves
next to nothing exposed ends the search, and so does their number times that of nodes: ways take their time, while on
large schedules, which repeat themselves, they differ least. All of it goes by times at the clock that the first way
leads to, or on the largest that what no order can beat leads to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from overlapc.estimators.load import changes_clock, estimates_at_load
from overlapc.passes.base import Context, Pass, PassReport
from overlapc.passes.judge import best, cost
from overlapc.passes.pipeline import AFTER, ENDS, FINER, FIRST, LAST, WAYS, Way
from overlapc.passes.runner import run_passes, select
from overlapc.schedule.model import Schedule

# Less exposed than this share of the step, and no other way is tried: they cost as much time as the first.
GOOD_ENOUGH = 0.001
# At most so many nodes in all the ways that are gone: two ways of 20,000 nodes take some seconds.
NODES_IN_ALL = 40_000
# Where there is time for no more than these, none is gone only to know the clock.
FEW = 2
# So many of the ways go through the last passes, if they cost no more than so many times what the best does before
# them: on a captured step with two groups the second best, 0.8% behind, came out 2% ahead.
FINISHED = 2
NEAR_THE_BEST = 1.02

_Known = dict[tuple[str, float, tuple[str, ...]], tuple[Schedule, PassReport]]  # pass, margin, order -> what it did


@dataclass(frozen=True)
class _Ended:
    """Where a way led."""

    way: Way
    schedule: Schedule
    reports: tuple[PassReport, ...]
    cost: tuple[float, float]


def run_ways(schedule: Schedule, ctx: Context) -> tuple[Schedule, tuple[PassReport, ...]]:
    """What the best way made of `schedule`, its nodes' estimates as they came, and the reports of the passes on it."""
    quiet = replace(ctx, dump=None, stop_after=None)
    clocked, gone = _at_its_clock(schedule, quiet) if changes_clock(ctx.profile) else (schedule, 0)
    ended = _best_way(clocked, quiet, gone)
    after = select(AFTER)
    if ctx.dump is not None or ctx.stop_after is not None:  # asked for by the passes of the way that was chosen
        again = (*select(ended.way.first), *_passes(ended.way), *select(LAST), *after)
        final, reports = run_passes(clocked, ctx, again)
    else:
        final, last = run_passes(ended.schedule, ctx, after)
        reports = (*ended.reports, *last)
    if final is clocked:
        return schedule, reports
    if clocked is not schedule:
        final = final.with_estimates({node.name: node.estimate for node in schedule.nodes})
    return final, reports


def _at_its_clock(schedule: Schedule, ctx: Context) -> tuple[Schedule, int]:
    """`schedule` with the times of the clock at which the first way leaves the device (`estimators/load.py`), and the
    number of ways that were gone to know it: where there is time for two only, what no order can beat tells it as well.

    Ways are compared at one clock, and this is about what all of them lead to: at full load compute would take longer
    than it will, and hide more.
    """
    begun, _ = run_passes(schedule, ctx, select(FIRST))
    gone = int(_affordable(begun) > FEW)
    if gone:
        ended, _ = run_passes(begun, ctx, _passes(WAYS[0]))
        step_ns = ctx.timeline(ended).step_ns
    else:
        step_ns = ctx.timeline(begun).lower_bound_ns
    return schedule.with_estimates(estimates_at_load(begun, ctx.profile, step_ns)), gone


def _affordable(begun: Schedule) -> int:
    """How many ways there is time for."""
    return NODES_IN_ALL // max(1, len(begun.nodes))


def _best_way(schedule: Schedule, ctx: Context, gone: int) -> _Ended:
    """Tries the ways, `gone` of those that there is time for being gone already."""
    begun, first = run_passes(schedule, ctx, select(FIRST))
    count = _affordable(begun) - gone
    ended = sorted(_ends(begun, ctx, WAYS[: max(1, count - 1)]), key=lambda each: each.cost)
    finished: dict[tuple[float, float], _Ended] = {}  # by what they cost before the last passes: equal ones once
    for each in ended:
        if each.cost not in finished and len(finished) < FINISHED and each.cost[0] <= ended[0].cost[0] * NEAR_THE_BEST:
            final, last = run_passes(each.schedule, ctx, select(LAST))
            finished[each.cost] = _Ended(each.way, final, (*first, *each.reports, *last), cost(final, ctx))
    found = min(finished.values(), key=lambda each: each.cost)
    return found if count <= 1 or _is_good_enough(found, ctx) else _finer(schedule, found, ctx)


def _ends(begun: Schedule, ctx: Context, ways: Sequence[Way]) -> Iterator[_Ended]:
    """Where each of the ways leads, up to one that leaves next to nothing exposed."""
    known: _Known = {}
    for way in ways:
        ended, reports = run_passes(begun, ctx, _passes(way, known))
        found = _Ended(way, ended, reports, cost(ended, ctx))
        yield found
        if _is_good_enough(found, ctx):
            return


def _finer(schedule: Schedule, found: _Ended, ctx: Context) -> _Ended:
    """The better one of `found` and where its way leads from finer buckets."""
    begun, first = run_passes(schedule, ctx, select(FINER))
    if [each.merged for each in first] == [each.merged for each in found.reports[: len(FIRST)]]:
        return found
    ended, reports = run_passes(begun, ctx, (*_passes(found.way), *select(LAST)))
    finer = _Ended(replace(found.way, first=FINER), ended, (*first, *reports), cost(ended, ctx))
    return (found, finer)[best((found.cost, finer.cost))]


def _is_good_enough(found: _Ended, ctx: Context) -> bool:
    timeline = ctx.timeline(found.schedule)
    return timeline.exposed_ns <= GOOD_ENOUGH * timeline.step_ns


def default_names() -> set[str]:
    """Every pass that some way of the default ones consists of. A schedule goes one of them."""
    return {*FIRST, *FINER, *ENDS, *LAST, *AFTER, *(name for way in WAYS for name in way.passes)}


def _passes(way: Way, known: _Known | None = None) -> tuple[tuple[str, Pass], ...]:
    known = {} if known is None else known
    ahead = tuple((name, _once(name, each, way.margin, known)) for name, each in select(way.passes))
    return (*ahead, *((name, _once(name, each, 1.0, known)) for name, each in select(ENDS)))


def _once(name: str, each: Pass, margin: float, known: _Known) -> Pass:
    """`each` at that margin, which is not run again on an order that it has been run on: ways often meet."""

    def run(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
        key = name, margin, tuple(node.name for node in schedule.nodes)
        if key not in known:
            known[key] = each(schedule, replace(ctx, overlap_margin=ctx.overlap_margin * margin))
        moved, report = known[key]
        return moved, replace(report)  # the runner writes into it

    return run
