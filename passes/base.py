"""The interface of passes: registration, the context that a pass receives and the report that it returns.

A pass is a function `(Schedule, Context) -> (Schedule, PassReport)`. A pass that changes nothing returns the
schedule itself. The built-in passes never make the simulated step longer and never exceed `Context.limit_bytes`:
a change that does not pay off is undone, and the report says so.
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
from overlapc.schedule.late import with_late_collectives
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Estimate, Node, Schedule

REGISTERED: dict[str, Pass] = {}


@dataclass(frozen=True)
class Context:
    """The limits that a pass must keep, and the machine on which the simulator replays schedules.

    budget_bytes: the highest peak that a schedule may have; if None, the schedule's own budget or, without one, the
    incoming peak plus its share `peak_increase`. Set by the pipeline: incoming_peak_bytes, the peak of the incoming
    schedule, so that all passes share one allowance; final_bytes, the highest peak of the final order, if the orders
    before it may exceed that. peak_of: computes the peak that is compared with a budget and reported. dump: called with
    a stem such as `01_sink_waits.after` and the schedule's text.

    overlap_margin: collectives start early enough to be hidden even if they take this many times their estimate.
    estimate: estimates nodes that a pass creates. merge_payloads: merges the payloads of several starts of one
    collective, or of several kernels of one kind, in order, or returns a string that says why it cannot; required to
    merge nodes that have payloads. kernel_kind: maps a kernel's payload to a value that is equal for kernels that may
    share a launch; None if the kernel may not. cache_dir: stores the simulator in C; None selects that in Python.
    """

    profile: DeviceProfile = IDEAL
    budget_bytes: int | None = None
    peak_increase: float = 0.25
    passes: Sequence[str | Pass] | None = None  # None for pipeline.ORDER
    reorder_collectives: bool = False  # let a start pass independent starts of its group, where that pays off
    overlap_margin: float = 1.0
    effort: int = 60_000  # replays that a search may use, about 0.001 ms each; long replays count more
    stop_after: str | None = None  # "PASS" or "PASS:MOVES"; see bisect.py
    most_moves: int | None = None  # set by the runner for stop_after="PASS:MOVES"; see PassReport.counted
    estimate: Callable[[Node], Estimate | None] | None = None
    merge_payloads: Callable[[Sequence[Any]], Any] | None = None
    kernel_kind: Callable[[Any], Hashable | None] | None = None
    cache_dir: Path | None = None
    verify: bool = True
    trial: bool = False  # only the cost of the order is asked for: no verification, and a plan for one limit may do
    check_memory: bool = False  # compare incremental memory with recomputation after every move
    dump: Callable[[str, str], None] | None = None
    incoming_peak_bytes: int | None = None
    final_bytes: int | None = None
    peak_of: Callable[[Schedule], int] = lambda schedule: analyze(schedule).peak_bytes

    def limit_bytes(self, schedule: Schedule) -> int:
        """Return the highest peak memory that a pass may give to `schedule`."""
        budget = self.budget_bytes if self.budget_bytes is not None else schedule.budget_bytes
        if budget is not None:
            return budget
        peak = self.incoming_peak_bytes
        if peak is None:
            peak = analyze(schedule).peak_bytes
        return int(peak * (1 + self.peak_increase))

    def timeline(self, schedule: Schedule) -> Timeline:
        """Return the simulator's replay of `schedule`, cached with it: the next pass starts from the same replay."""
        return schedule.fact("timeline", lambda: simulate(schedule, self.profile, self.cache_dir), of=self.profile)

    def late(self, schedule: Schedule) -> Schedule:
        """Return `schedule` with each collective's estimate times `overlap_margin`. Cached with it."""
        return with_late_collectives(schedule, self.overlap_margin)


@dataclass
class PassReport:
    """What a pass changed, and why."""

    name: str
    reasons: dict[str, str] = field(default_factory=dict)  # node -> why it is not moved further
    limits: dict[str, Reason] = field(default_factory=dict)  # node -> the `Reason` behind that text, if there is one
    moves: dict[str, int] = field(default_factory=dict)  # node -> positions that it moved, earlier or later
    moved_with: dict[str, tuple[str, ...]] = field(default_factory=dict)  # node -> the nodes that moved with it
    merged: dict[str, tuple[str, ...]] = field(default_factory=dict)  # new node -> the nodes that it replaces
    counted: bool = False  # whether the pass itself stopped after Context.most_moves
    seconds: float = 0.0  # set by the runner
    changed: bool = False  # set by the runner

    def because(self, node: Node | str, reason: Reason | str, about: str = "") -> None:
        """Record why `node` is where it is, in place of earlier reasons. about: the node that the reason names."""
        name = node if isinstance(node, str) else node.name
        if isinstance(reason, Reason):
            self.limits[name] = reason
            self.reasons[name] = reason.about(about)
        else:
            self.limits.pop(name, None)
            self.reasons[name] = reason

    def moved(self, node: Node | str, positions: int, others: Sequence[str] = ()) -> None:
        """Record that `node` moved by this many positions, together with `others`; several moves add up."""
        name = node if isinstance(node, str) else node.name
        if positions:
            self.moves[name] = self.moves.get(name, 0) + abs(positions)
        if others:
            self.moved_with[name] = tuple(dict.fromkeys((*self.moved_with.get(name, ()), *others)))


Pass = Callable[[Schedule, Context], tuple[Schedule, PassReport]]


def register_pass(name: str) -> Callable[[Pass], Pass]:
    """Register a pass under a name, by which the option `passes` can then select it."""

    def register(function: Pass) -> Pass:
        if name in REGISTERED:
            raise ConfigError(f"a pass named {name!r} is registered already")
        REGISTERED[name] = function
        return function

    return register
