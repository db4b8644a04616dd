"""Passes: how they are named, what they are given, what they report, and the runner.

A pass is a function `(Schedule, Context) -> (Schedule, PassReport)`. One that changes nothing returns the
schedule itself. Ours never make simulated time worse and never exceed `Context.limit_bytes`: what did not
pay is undone and says so.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from overlapc.errors import ConfigError, MemoryBudgetError, ScheduleError, unknown_name
from overlapc.estimators.device import IDEAL, DeviceProfile
from overlapc.estimators.load import settled
from overlapc.estimators.timeline import Timeline, simulate
from overlapc.garbage import no_collections
from overlapc.passes.bisect import first_moves, parse_stop
from overlapc.passes.reasons import Reason
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Estimate, Node, Schedule
from overlapc.schedule.verify import verify
from overlapc.units import human_bytes

if TYPE_CHECKING:
    from overlapc.passes.records import CollectiveRecord

_PASSES: dict[str, Pass] = {}
_SIGNATURE = "a function (Schedule, Context) -> (Schedule, PassReport)"


@dataclass(frozen=True)
class Context:
    """What a pass may ask: limits and the machine that the simulator replays on.

    budget_bytes: the most a schedule may use at its peak; None takes the schedule's own budget, or else
    `peak_increase` over the peak that came in. incoming_peak_bytes: that peak, set by the runner so that
    the passes of a pipeline share one allowance. dump: called with a stem such as `01_sink_waits.after` and
    the schedule's text.

    overlap_margin: collectives are started early enough to be hidden if they take this many times their
    estimate. estimate: asked about nodes that a pass made. merge_payloads: one payload for several starts of
    one collective, or for several kernels of one kind, in their order, or a string that says why not; who merges nodes
    needs it where they have payloads. kernel_kind: by a kernel's payload, equal for those that may share a launch; None
    for one that shares its launch with no other.
    """

    profile: DeviceProfile = IDEAL
    budget_bytes: int | None = None
    peak_increase: float = 0.25
    passes: Sequence[str | Pass] | None = None  # None for pipeline.ORDER
    reorder_collectives: bool = False  # let a start pass independent ones of its group, where that pays
    overlap_margin: float = 1.0
    stop_after: str | None = None  # "PASS" or "PASS:MOVES"; see bisect.py
    most_moves: int | None = None  # set by the runner for stop_after="PASS:MOVES"; see PassReport.counted
    estimate: Callable[[Node], Estimate | None] | None = None
    merge_payloads: Callable[[Sequence[Any]], Any] | None = None
    kernel_kind: Callable[[Any], Hashable | None] | None = None
    verify: bool = True
    check_memory: bool = False  # compare incremental memory with recomputation after every move
    dump: Callable[[str, str], None] | None = None
    incoming_peak_bytes: int | None = None

    def limit_bytes(self, schedule: Schedule) -> int:
        """The most memory that a pass may let `schedule` use at its peak."""
        budget = self.budget_bytes if self.budget_bytes is not None else schedule.budget_bytes
        if budget is not None:
            return budget
        peak = self.incoming_peak_bytes
        if peak is None:
            peak = analyze(schedule).peak_bytes
        return int(peak * (1 + self.peak_increase))

    def timeline(self, schedule: Schedule) -> Timeline:
        """The simulator's replay of `schedule`, kept with it: one pass asks for what the one before was judged by."""
        return schedule.fact("timeline", lambda: simulate(schedule, self.profile), of=self.profile)

    def late(self, schedule: Schedule) -> Schedule:
        """`schedule` if every collective takes `overlap_margin` times its estimate. Kept with it, nodes too."""
        return schedule.fact("late", lambda: self._late(schedule), of=self.overlap_margin)

    def _late(self, schedule: Schedule) -> Schedule:
        if schedule.moved_from is not None:
            order = (node.name for node in schedule.nodes)
            return self.late(schedule.moved_from).replace_order(order, reorder_collectives=schedule.collectives_moved)
        return schedule.with_estimates(
            {
                node.name: Estimate(node.estimate.ns * self.overlap_margin, node.estimate.source)
                for node in schedule.nodes
                if node.comm is not None and node.estimate is not None
            }
        )


@dataclass
class PassReport:
    """What a pass did and why. `moves` counts positions, earlier or later."""

    name: str
    reasons: dict[str, str] = field(default_factory=dict)  # node -> why it stopped there
    limits: dict[str, Reason] = field(default_factory=dict)  # the same as one of the named reasons
    moves: dict[str, int] = field(default_factory=dict)
    moved_with: dict[str, tuple[str, ...]] = field(default_factory=dict)  # node -> those that moved with it
    merged: dict[str, tuple[str, ...]] = field(default_factory=dict)  # new node -> the nodes it stands for
    counted: bool = False  # whether the pass itself kept to Context.most_moves
    seconds: float = 0.0  # filled in by the runner
    changed: bool = False  # likewise

    def because(self, node: Node | str, reason: Reason | str, about: str = "") -> None:
        """Note why `node` is where it is; the last reason stands."""
        name = node if isinstance(node, str) else node.name
        if isinstance(reason, Reason):
            self.limits[name] = reason
            self.reasons[name] = reason.about(about)
        else:
            self.limits.pop(name, None)
            self.reasons[name] = reason

    def moved(self, node: Node | str, positions: int, others: Sequence[str] = ()) -> None:
        """Count a move of `node` by that many positions, together with `others`."""
        name = node if isinstance(node, str) else node.name
        if positions:
            self.moves[name] = self.moves.get(name, 0) + abs(positions)
        if others:
            self.moved_with[name] = tuple(dict.fromkeys((*self.moved_with.get(name, ()), *others)))


Pass = Callable[[Schedule, Context], tuple[Schedule, PassReport]]


@dataclass(frozen=True)
class Result:
    """What came out of a pipeline."""

    schedule: Schedule
    reports: tuple[PassReport, ...]
    before: Timeline
    after: Timeline
    collectives: tuple[CollectiveRecord, ...]


def register_pass(name: str) -> Callable[[Pass], Pass]:
    """Make a pass known by name, for `passes=` in the options."""

    def register(function: Pass) -> Pass:
        if name in _PASSES:
            raise ConfigError(f"a pass named {name!r} is registered already")
        _PASSES[name] = function
        return function

    return register


def select(passes: Sequence[str | Pass] | None) -> tuple[tuple[str, Pass], ...]:
    """(name, pass) for names, callables and `package.module:function`; None for the default order.

    ConfigError for an unknown name, for what cannot be imported, and for what cannot be called as a pass is.
    """
    from overlapc.passes.pipeline import ORDER  # which imports, and so registers, every pass of ours

    chosen: list[tuple[str, Pass]] = []
    for each in ORDER if passes is None else passes:
        if isinstance(each, str) and each in _PASSES:
            chosen.append((each, _PASSES[each]))
        elif isinstance(each, str) and ":" not in each:
            raise ConfigError(unknown_name("pass", each, _PASSES))
        else:
            chosen.append(_checked(_imported(each) if isinstance(each, str) else each))
    return tuple(chosen)


def is_ours(name: str) -> bool:
    """Whether overlapc's own code says what the pass of this name does."""
    found = select((name,))[0][1] if ":" not in name else None
    return found is not None and found.__module__.startswith("overlapc.")


def _imported(path: str) -> Pass:
    """The function that `package.module:function` names."""
    module, _, name = path.partition(":")
    try:
        found: Pass = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"passes: cannot import {path}: {error}; is its folder on PYTHONPATH?") from None
    return found


def _checked(given: Pass) -> tuple[str, Pass]:
    name = getattr(given, "__name__", type(given).__name__)
    try:
        inspect.signature(given).bind(None, None)
    except TypeError as error:
        raise ConfigError(f"passes: {name} is no pass ({error}); a pass is {_SIGNATURE}") from None
    return name, given


@no_collections()
def run_pipeline(schedule: Schedule, ctx: Context) -> Result:
    """The passes of `Context.passes`, or the best of the default ways, and what became of every collective.

    MemoryBudgetError when a budget was set and the order that came in exceeds it already: it holds each
    buffer for the shortest time of all orders that the passes can reach, so none of them fits.
    """
    from overlapc.passes.records import records_of  # these need what is defined here
    from overlapc.passes.ways import default_names, run_ways

    passes = select(ctx.passes)
    last, _ = parse_stop(ctx.stop_after) if ctx.stop_after is not None else (None, None)
    names = {name for name, _ in passes} if ctx.passes is not None else default_names()
    if last is not None and last not in names:
        raise ConfigError("stop_after: " + unknown_name("pass", last, names))
    incoming = analyze(schedule)
    budget = ctx.budget_bytes if ctx.budget_bytes is not None else schedule.budget_bytes
    if budget is not None and incoming.peak_bytes > budget:
        at = "" if incoming.peak_at is None else f" at {schedule.nodes[incoming.peak_at].name}"
        raise MemoryBudgetError(
            f"{schedule.name}: memory_budget is {human_bytes(budget)}, and the graph needs"
            f" {human_bytes(incoming.peak_bytes)}{at} before any pass adds to it\n"
            f"hint: raise memory_budget, shard more, or checkpoint activations"
        )
    ctx = dataclasses.replace(ctx, incoming_peak_bytes=incoming.peak_bytes)
    final, reports = run_ways(schedule, ctx) if ctx.passes is None else run_passes(schedule, ctx, passes)
    # Passes compare orders at one clock; what is reported is at the clock that each order leads to.
    before = settled(ctx.timeline(schedule))
    after = before if final is schedule else settled(ctx.timeline(final))
    return Result(after.schedule, reports, before, after, records_of(reports, before, after))


def run_passes(
    schedule: Schedule, ctx: Context, passes: Sequence[tuple[str, Pass]]
) -> tuple[Schedule, tuple[PassReport, ...]]:
    """Time, run, verify and dump each pass, up to `Context.stop_after`."""
    last, moves = parse_stop(ctx.stop_after) if ctx.stop_after is not None else (None, None)
    reports: list[PassReport] = []
    current = schedule
    for number, (name, each) in enumerate(passes, 1):
        if ctx.dump is not None:
            ctx.dump(f"{number:02}_{name}.before", str(current))
        begin = time.perf_counter()
        moved, report = _call(name, each, current, dataclasses.replace(ctx, most_moves=moves) if name == last else ctx)
        if name == last and moves is not None and not report.counted:
            moved = first_moves(current, moved, moves)
        report.seconds = time.perf_counter() - begin
        report.changed = moved is not current
        if ctx.verify and report.changed:
            verify(
                moved,
                name,
                reference=current,
                merged=report.merged,
                may_reorder_collectives=ctx.reorder_collectives,
                # Part of a pass may need more memory than all of it.
                limit_bytes=None if name == last and moves is not None else ctx.limit_bytes(schedule),
            )
        if ctx.dump is not None:
            ctx.dump(f"{number:02}_{name}.after", str(moved))
        current = moved
        reports.append(report)
        if name == last:
            break
    return current, tuple(reports)


def _call(name: str, each: Pass, schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """What the pass returns. ScheduleError, with its name, for a move that is none and for a result that is none."""
    try:
        result: Any = each(schedule, ctx)
    except ScheduleError as error:
        raise ScheduleError(f"{name}: {error}") from error
    match result:
        case (Schedule() as moved, PassReport() as report):
            return moved, report
    raise ScheduleError(f"{name} returned {type(result).__name__}; a pass is {_SIGNATURE}")
