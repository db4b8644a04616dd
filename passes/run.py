"""A schedule through its passes, and what became of it: what the backend and `overlapc plan` call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from overlapc.errors import ConfigError, MemoryBudgetError, unknown_name
from overlapc.estimators.simulator.clock_under_load import settled
from overlapc.estimators.timeline import Timeline
from overlapc.gc_paused import gc_paused
from overlapc.passes.base import Context, Pass, PassReport
from overlapc.passes.bisect import parse_stop
from overlapc.passes.reasons import Reason
from overlapc.passes.records import CollectiveRecord, records_of
from overlapc.passes.runner import run_passes, select
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Schedule
from overlapc.units import human_bytes

# So often a plan may use twice as much above the incoming peak as the one before: from 1.25 to 9 times that peak.
DOUBLINGS = 5


@dataclass(frozen=True)
class Result:
    """What came out of a pipeline."""

    schedule: Schedule
    reports: tuple[PassReport, ...]
    before: Timeline
    after: Timeline
    collectives: tuple[CollectiveRecord, ...]
    ordered: Schedule  # the same order with the estimates that came in, from which its clock follows


@gc_paused()
def run_pipeline(schedule: Schedule, ctx: Context) -> Result:
    """The passes of `Context.passes`, or the default ones, and what became of every collective.

    MemoryBudgetError when a budget was set and the order that came in exceeds it already: it holds each
    buffer for the shortest time of all orders that the passes can reach, so none of them fits.
    """
    passes = select(ctx.passes)
    last, _ = parse_stop(ctx.stop_after) if ctx.stop_after is not None else (None, None)
    names = {name for name, _ in passes}
    if last is not None and last not in names:
        raise ConfigError("stop_after: " + unknown_name("pass", last, names))
    incoming = analyze(schedule)
    budget = ctx.budget_bytes if ctx.budget_bytes is not None else schedule.budget_bytes
    if budget is not None and incoming.peak_bytes > budget:
        at = "" if incoming.peak_at is None else f" at {schedule.nodes[incoming.peak_at].name}"
        raise MemoryBudgetError(
            f"{schedule.name}: memory_budget leaves {human_bytes(budget)}, and the graph needs"
            f" {human_bytes(incoming.peak_bytes)}{at} before any pass adds to it\n"
            f"hint: raise memory_budget, shard more, or checkpoint activations"
        )
    ctx = dataclasses.replace(ctx, incoming_peak_bytes=incoming.peak_bytes)
    if budget is None or not passes:
        return _planned(schedule, ctx, passes)
    # Which limit is best is asked without these: what stops early is then part of the plan that is made without it.
    whole = within = dataclasses.replace(ctx, dump=None, stop_after=None)
    planned: dict[int, Result] = {}
    for limit in _limits(incoming.peak_bytes, budget, ctx.peak_increase):
        # Not what a search found: the more effort, the sooner that might end the series, and the longer the step.
        by_rules = _planned(schedule, dataclasses.replace(within, effort=0), passes).collectives if planned else ()
        if planned and not any(row.exposed_after_ns and Reason.MEMORY in row.causes for row in by_rules):
            break
        within = dataclasses.replace(whole, budget_bytes=limit)
        planned[limit] = _planned(schedule, within, passes)
    shortest = min(planned, key=lambda limit: planned[limit].after.step_ns)
    if whole == ctx:
        return planned[shortest]
    return _planned(schedule, dataclasses.replace(ctx, budget_bytes=shortest), passes)


def _limits(peak_bytes: int, budget_bytes: int, increase: float) -> Iterator[int]:
    """Limits to plan for, from the one without a budget up to the budget.

    More memory leads passes elsewhere, not always to a shorter step. The budget only says how many of the same limits
    are planned for, and the shortest plan is taken: so a larger budget never makes the step longer.
    """
    yield min(int(peak_bytes * (1 + increase)), budget_bytes)
    for doubled in range(1, DOUBLINGS + 1):
        limit_bytes = int(peak_bytes * (1 + 2**doubled * (increase or Context.peak_increase)))
        if limit_bytes <= budget_bytes:
            yield limit_bytes


def _planned(schedule: Schedule, ctx: Context, passes: Sequence[tuple[str, Pass]]) -> Result:
    final, reports = run_passes(schedule, ctx, passes)
    # Passes compare orders at one clock; what is reported is at the clock that each order leads to.
    before = settled(ctx.timeline(schedule))
    after = before if final is schedule else settled(ctx.timeline(final))
    return Result(after.schedule, reports, before, after, records_of(reports, before, after), final)
