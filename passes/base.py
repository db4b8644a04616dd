"""What a pass is: how it is named, what it is given and what it reports.

A pass is a function `(Schedule, Context) -> (Schedule, PassReport)`. One that changes nothing returns the
schedule itself. Ours never make simulated time worse and never exceed `Context.limit_bytes`: what did not
pay is undone and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from overlapc.errors import ConfigError
from overlapc.estimators.device import IDEAL, DeviceProfile
from overlapc.estimators.timeline import Timeline, simulate
from overlapc.passes.reasons import Reason
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Estimate, Node, Schedule

REGISTERED: dict[str, Pass] = {}


@dataclass(frozen=True)
class Context:
    """What a pass may ask: limits and the machine that the simulator replays on.

    budget_bytes: the most a schedule may use at its peak; None takes the schedule's own budget, or else `peak_increase`
    over the peak that came in. Set by the runner: incoming_peak_bytes, that peak, so that passes of a pipeline share
    one allowance; final_bytes, the most that the last order may use where passes may go through others. peak_of: the
    peak that is compared with a budget, and reported. dump: called with a stem such as `01_sink_waits.after` and the
    schedule's text.

    overlap_margin: collectives are started early enough to be hidden if they take this many times their
    estimate. estimate: asked about nodes that a pass made. merge_payloads: one payload for several starts of
    one collective, or for several kernels of one kind, in their order, or a string that says why not; who merges nodes
    needs it where they have payloads. kernel_kind: by a kernel's payload, equal for those that may share a launch; None
    for one that shares its launch with no other. cache_dir: where the simulator in C is kept; None for that in Python.
    """

    profile: DeviceProfile = IDEAL
    budget_bytes: int | None = None
    peak_increase: float = 0.25
    passes: Sequence[str | Pass] | None = None  # None for pipeline.ORDER
    reorder_collectives: bool = False  # let a start pass independent ones of its group, where that pays
    overlap_margin: float = 1.0
    effort: int = 40_000  # replays that a search may take, some 0.02 ms each; long ones count for more
    stop_after: str | None = None  # "PASS" or "PASS:MOVES"; see bisect.py
    most_moves: int | None = None  # set by the runner for stop_after="PASS:MOVES"; see PassReport.counted
    estimate: Callable[[Node], Estimate | None] | None = None
    merge_payloads: Callable[[Sequence[Any]], Any] | None = None
    kernel_kind: Callable[[Any], Hashable | None] | None = None
    cache_dir: Path | None = None
    verify: bool = True
    check_memory: bool = False  # compare incremental memory with recomputation after every move
    dump: Callable[[str, str], None] | None = None
    incoming_peak_bytes: int | None = None
    final_bytes: int | None = None
    peak_of: Callable[[Schedule], int] = lambda schedule: analyze(schedule).peak_bytes

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
        return schedule.fact("timeline", lambda: simulate(schedule, self.profile, self.cache_dir), of=self.profile)

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


def register_pass(name: str) -> Callable[[Pass], Pass]:
    """Make a pass known by name, for `passes=` in the options."""

    def register(function: Pass) -> Pass:
        if name in REGISTERED:
            raise ConfigError(f"a pass named {name!r} is registered already")
        REGISTERED[name] = function
        return function

    return register
