"""Run a schedule through its passes and record the result: the entry point for the backend and `overlapc plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from overlapc.errors import ConfigError, MemoryBudgetError, unknown_name
from overlapc.estimators.simulator.clock_under_load import settled
from overlapc.estimators.timeline import Timeline
from overlapc.gc_paused import gc_paused
from overlapc.passes.base import Context, Pass, PassReport
from overlapc.passes.bisect import parse_stop
from overlapc.passes.judge import cost
from overlapc.passes.reasons import Reason
from overlapc.passes.records import CollectiveRecord, records_of
from overlapc.passes.runner import run_passes, select
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Schedule
from overlapc.units import human_bytes

Passes = Sequence[tuple[str, Pass]]
Planned = tuple[Schedule, tuple[PassReport, ...]]

# With a budget, plans are made for limits of 1 + share * `peak_increase` times the incoming peak.
SHARES = (0, 0.125, 0.25, 0.5), (1, 2, 4, 8, 16, 32)
# Without a budget, more memory must shorten the step by this share: no estimate tells apart what differs by less.
WORTH_MEMORY = 0.005
# Search effort for comparing two memory limits (`limit_without_budget`). The rule-based passes alone are not enough:
# sometimes only the search uses the additional memory.
TRIAL_EFFORT = 4_000


@dataclass(frozen=True)
class Result:
    """The result of a pipeline."""

    schedule: Schedule
    reports: tuple[PassReport, ...]
    before: Timeline
    after: Timeline
    collectives: tuple[CollectiveRecord, ...]
    ordered: Schedule  # the final order with the incoming estimates, which determine its device clock
    incoming_peak_bytes: int
    peak_bytes: int


@gc_paused()
def run_pipeline(schedule: Schedule, ctx: Context) -> Result:
    """Run the passes of `Context.passes`, or the default passes, and record what became of every collective.

    Raise MemoryBudgetError if the incoming order already exceeds a given budget: of all orders that the passes can
    reach, it holds each buffer for the shortest time, so no other order fits.
    """
    passes = select(ctx.passes)
    names = {name for name, _ in passes}
    if ctx.stop_after is not None and (last := parse_stop(ctx.stop_after)[0]) not in names:
        raise ConfigError("stop_after: " + unknown_name("pass", last, names))
    incoming = analyze(schedule)
    budget = ctx.budget_bytes if ctx.budget_bytes is not None else schedule.budget_bytes
    ctx = replace(ctx, incoming_peak_bytes=incoming.peak_bytes)
    if budget is not None and (peak := ctx.peak_of(schedule)) > budget:
        at = "" if incoming.peak_at is None else f" (at {schedule.nodes[incoming.peak_at].name})"
        raise MemoryBudgetError(
            f"{schedule.name}: memory_budget leaves {human_bytes(budget)} for this graph, but it needs"
            f" {human_bytes(peak)}{at} even in its original order"
            "\nhint: raise memory_budget, shard more, or checkpoint activations",
            peak,
        )
    plans = _Plans(schedule, replace(ctx, final_bytes=budget), passes)
    return plans.of_limit(plans.limit_without_budget()) if budget is None else plans.shortest(budget)


class _Plans:
    """Plans of a schedule for several memory limits.

    With more memory, or more effort, passes find another order, which is not always shorter. With a budget, plans are
    therefore made for a fixed series of limits, a larger budget only adds limits, and the shortest plan is taken:
    neither a larger budget nor more effort makes the step longer. One of them is the plan without a budget, limited to
    orders that fit.
    """

    def __init__(self, schedule: Schedule, ctx: Context, passes: Passes) -> None:
        self.schedule, self.ctx, self.passes = schedule, ctx, passes
        names = [name for name, _ in passes]
        # Plans are compared before share_launches: its result may differ between ranks, which must take the same plan.
        self.last = names.index("share_launches") if "share_launches" in names else len(names)
        self.search = names.index("refine", 0, self.last) if "refine" in names[: self.last] else self.last
        self.orders: dict[int, Planned] = {}  # by limit: before the search
        self.plans: dict[int, Result] = {}  # by limit
        self.shortest_ns = inf  # the shortest step so far in the order before the search

    def limit_without_budget(self) -> int:
        """Return what `peak_increase` allows, or a quarter of that increase if more would hardly shorten the step."""
        most, less = (self._limit(share, self.ctx.peak_increase) for share in (1, 0.25))
        if self.search == self.last or analyze(self._order(most)[0]).peak_bytes <= less:
            return most
        return less if self._trial_ns(less) <= self._trial_ns(most) * (1 + WORTH_MEMORY) else most

    def _trial_ns(self, limit: int) -> float:
        """Return the cost after a short search, of the same effort whatever `Context.effort` is."""
        ctx = replace(self.ctx, budget_bytes=limit, dump=None, stop_after=None, effort=TRIAL_EFFORT, trial=True)
        return cost(run_passes(self._order(limit)[0], ctx, self.passes[self.search : self.last])[0], ctx)[0]

    def shortest(self, budget: int) -> Result:
        """Return the shortest plan that fits; of equally short plans, the one for the lowest limit."""
        if self.ctx.trial:  # a plan for one limit may be 1% longer than the shortest, and takes a fifth of the time
            self._plan(budget)
            if self.plans[budget].peak_bytes <= budget:
                return self.of_limit(budget)
        for shares in SHARES:
            for share in shares:
                limit = self._limit(share, self.ctx.peak_increase or Context.peak_increase)
                if limit > budget or not self._plan(limit):
                    break
        if (limit := self.limit_without_budget()) not in self.plans:
            self._plan(limit)
        fitting = {limit: plan for limit, plan in self.plans.items() if plan.peak_bytes <= budget}
        if not fitting:
            needed = self.plans[min(self.plans)].peak_bytes
            raise MemoryBudgetError(
                f"{self.schedule.name}: memory_budget leaves {human_bytes(budget)} for this graph, but with the shared"
                f" memory for copies the smallest plan needs {human_bytes(needed)}"
                '\nhint: raise memory_budget, or set options={"transport": "nccl"}',
                needed,
            )
        return self.of_limit(min(sorted(fitting), key=lambda limit: fitting[limit].after.step_ns))

    def of_limit(self, limit: int) -> Result:
        """Return the plan for a limit, by all passes up to `Context.stop_after`."""
        ctx = replace(self.ctx, budget_bytes=limit)
        if ctx.dump is not None or ctx.stop_after is not None:
            return _result(self.schedule, ctx, run_passes(self.schedule, ctx, self.passes))
        if plan := self.plans.get(limit):
            return self._continued((plan.ordered, plan.reports), ctx, self.passes[self.last :])
        return self._continued(self._order(limit), ctx, self.passes[self.search :])

    def _limit(self, share: float, unit: float) -> int:
        return int((self.ctx.incoming_peak_bytes or 0) * (1 + share * unit))

    def _order(self, limit: int) -> Planned:
        if limit not in self.orders:
            ctx = replace(self.ctx, budget_bytes=limit, dump=None, stop_after=None)
            self.orders[limit] = run_passes(self.schedule, ctx, self.passes[: self.search])
        return self.orders[limit]

    def _plan(self, limit: int) -> bool:
        """Plan for a limit. Return whether a larger limit may help: in the order before the search, the step is shorter
        than with smaller limits, or memory keeps a collective exposed.

        The order after the search does not count: more effort would then end the series of limits earlier.
        """
        ctx = replace(self.ctx, budget_bytes=limit, dump=None, stop_after=None)
        self.plans[limit] = self._continued(self._order(limit), ctx, self.passes[self.search : self.last])
        unsearched = _result(self.schedule, ctx, self._order(limit))
        before_ns, self.shortest_ns = self.shortest_ns, min(self.shortest_ns, unsearched.after.step_ns)
        exposed = (row for row in unsearched.collectives if row.exposed_after_ns)
        return self.shortest_ns < before_ns or any(Reason.MEMORY in row.causes for row in exposed)

    def _continued(self, planned: Planned, ctx: Context, passes: Passes) -> Result:
        final, reports = run_passes(planned[0], ctx, passes)
        planned[0].forget("search")
        return _result(self.schedule, ctx, (final, (*planned[1], *reports)))


def _result(schedule: Schedule, ctx: Context, planned: Planned) -> Result:
    """Record the result of running passes on a schedule."""
    final, reports = planned
    # Passes compare all orders at one device clock; the report has each order at the clock that it leads to.
    before = settled(ctx.timeline(schedule))
    after = before if final is schedule else settled(ctx.timeline(final))
    peaks = ctx.peak_of(schedule), ctx.peak_of(final)
    return Result(after.schedule, reports, before, after, records_of(reports, before, after), final, *peaks)
