"""A schedule through its passes, and what became of it: what the backend and `overlapc plan` call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

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

Passes = Sequence[tuple[str, Pass]]

# What plans within a budget may use above the incoming peak; 1 stands for `Context.peak_increase`, as without a budget.
SHARES = (0, 0.25, 0.5), (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class Result:
    """What came out of a pipeline."""

    schedule: Schedule
    reports: tuple[PassReport, ...]
    before: Timeline
    after: Timeline
    collectives: tuple[CollectiveRecord, ...]
    ordered: Schedule  # the same order with the estimates that came in, from which its clock follows
    incoming_peak_bytes: int
    peak_bytes: int


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
    ctx = replace(ctx, incoming_peak_bytes=incoming.peak_bytes)
    if budget is not None and (peak := ctx.peak_of(schedule)) > budget:
        at = "" if incoming.peak_at is None else f" at {schedule.nodes[incoming.peak_at].name}"
        raise MemoryBudgetError(
            f"{schedule.name}: memory_budget leaves {human_bytes(budget)}, and the graph needs {human_bytes(peak)}{at}"
            f" before any pass adds to it\nhint: raise memory_budget, shard more, or checkpoint activations",
            peak,
        )
    if budget is None or not passes:
        return _result(schedule, ctx, run_passes(schedule, ctx, passes))
    return _Within(schedule, replace(ctx, final_bytes=budget), passes, budget).shortest()


class _Within:
    """Plans of a schedule that fit into a budget.

    More memory leads passes elsewhere, not always to a shorter step, and so does more effort. So a budget only says up
    to which of the same limits there is a plan for each, and the shortest is taken: neither ever makes the step longer.
    The plan that is made without a budget is one of them, as far as its search came within this one.
    """

    def __init__(self, schedule: Schedule, ctx: Context, passes: Passes, budget: int) -> None:
        self.schedule, self.ctx, self.passes, self.budget = schedule, ctx, passes, budget
        names = [name for name, _ in passes]
        # The last pass does not count: ranks may differ in what it does, and have to take the same plan.
        self.last = names.index("share_launches") if "share_launches" in names else len(names)
        self.search = names.index("refine", 0, self.last) if "refine" in names[: self.last] else self.last
        self.plans: dict[int, Result] = {}  # by limit

    def shortest(self) -> Result:
        """The shortest plan that fits; of equal ones that for the lowest limit."""
        peak, unit = self.ctx.incoming_peak_bytes or 0, self.ctx.peak_increase or Context.peak_increase
        for shares in SHARES:
            for share in shares:
                limit = int(peak * (1 + share * unit))
                if (limit > self.budget and share != 1) or not self._plan(limit):
                    break
        fitting = {limit: plan for limit, plan in self.plans.items() if plan.peak_bytes <= self.budget}
        if not fitting:
            why = f"{self.schedule.name}: memory_budget leaves {human_bytes(self.budget)}, too little for copies' pools"
            raise MemoryBudgetError(f"{why}\nhint: raise memory_budget", self.plans[min(self.plans)].peak_bytes)
        limit = min(sorted(fitting), key=lambda limit: fitting[limit].after.step_ns)
        ctx = replace(self.ctx, budget_bytes=limit)
        if ctx.dump is not None or ctx.stop_after is not None:
            return _result(self.schedule, ctx, run_passes(self.schedule, ctx, self.passes))
        return self._continued(fitting[limit], ctx, self.passes[self.last :])

    def _plan(self, limit: int) -> bool:
        """Plan for a limit; whether more memory may help: it is what keeps a collective exposed by the rules alone.

        Not by a search: the more effort, the fewer limits there would be plans for.
        """
        ctx = replace(self.ctx, budget_bytes=limit, dump=None, stop_after=None)
        ruled = _result(self.schedule, ctx, run_passes(self.schedule, ctx, self.passes[: self.search]))
        self.plans[limit] = self._continued(ruled, ctx, self.passes[self.search : self.last])
        return any(row.exposed_after_ns and Reason.MEMORY in row.causes for row in ruled.collectives)

    def _continued(self, plan: Result, ctx: Context, passes: Passes) -> Result:
        final, reports = run_passes(plan.ordered, ctx, passes)
        return _result(self.schedule, ctx, (final, (*plan.reports, *reports)))


def _result(schedule: Schedule, ctx: Context, planned: tuple[Schedule, tuple[PassReport, ...]]) -> Result:
    """What became of a schedule."""
    final, reports = planned
    # Passes compare orders at one clock; what is reported is at the clock that each order leads to.
    before = settled(ctx.timeline(schedule))
    after = before if final is schedule else settled(ctx.timeline(final))
    peaks = ctx.peak_of(schedule), ctx.peak_of(final)
    return Result(after.schedule, reports, before, after, records_of(reports, before, after), final, *peaks)
