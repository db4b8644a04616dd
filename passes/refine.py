"""Local search over whole orders: make any move that shortens the simulated step.

    a = kernel(x) : 9us; rs = reduce_scatter(a) @dp : 9us; s = wait(rs); y = kernel(s) : 9us; b = kernel(x) : 9us
 -> a = kernel(x) : 9us; rs = reduce_scatter(a) @dp : 9us; b = kernel(x) : 9us; s = wait(rs); y = kernel(s) : 9us

A move shifts one node (a start, a wait, a kernel or a call) some positions earlier or later, with the nodes in between
that must move along. Node and distance are drawn from a random generator that has the same seed on every rank. The move
is replayed with collectives as estimated and with late ones. It is made if neither the step nor the sum of both steps
(`judge.cost`) gets longer and memory has room. A move that changes no time is made, too, unless it takes more memory
than the incoming order: it may enable the next move. A move that shortens the step is tried next on all nodes like the
one that moved, because layers repeat. In a short schedule, where these moves leave effort, pairs of kernels then
exchange places (no single move leads there if the time beside both collectives is filled). Moves and exchanges
alternate until both gain nothing twice in a row. At last, waits move towards their readers if that costs nothing.

Times are those at the device clock that the incoming order leads to (`clock_under_load.py`). Effort is a number of
replays, never a time, so ranks agree; a search with more effort begins with the same moves, so it is never worse. With
a C compiler the search runs in C (`search.c` of the simulator), by the rules of this file, with the same moves.

Keeps: data dependences, the memory limit, and the order of collectives on each process group unless it may change.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import inf

from overlapc.estimators.simulator.clock_under_load import estimates_at_load
from overlapc.estimators.simulator.incremental import Timing
from overlapc.estimators.simulator.native import NativeReplay
from overlapc.estimators.simulator.native_search import NativeSearch
from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.bucket_cost import ns_of
from overlapc.passes.order import Move, Order
from overlapc.passes.reasons import Reason, reason_of
from overlapc.schedule import dependencies
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import COMPUTE, Kind, Schedule

# On average; longer replays (in schedules of 20,000 nodes, or of queues with a backlog) use up more effort.
BLOCKS_PER_REPLAY = 4
# After at most this many replays for each node that may move, nodes exchange places.
EFFORT_PER_NODE = 60
# The search ends after this many rounds of both without a gain: the first may only enable a gain of the second.
ROUNDS_WITHOUT_GAIN = 2
# So many proposed moves, most of them impossible and not replayed, use up as much effort as a replay.
PROPOSALS_PER_REPLAY = 20
COLLECTIVES_SHARE = 0.25  # of the proposed moves move starts and waits; the others move compute
POWERS = 7  # a node moves by 2**n to 2**(n + 1) - 1 positions, with each n below this equally likely
MOST_TOGETHER = 60  # nodes that one move takes along, at most
LATER = 32  # positions by which a wait moves towards its reader at last: about one layer
# A move that shortens the step by more than this share is tried on all nodes like the one that moved.
WORTH_REPEATING = 2e-5
SEED = 3  # seed 2 was tried on all captured steps, too, and two more seeds on three of them


@register_pass("refine")
def refine(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Search until the effort is used up; see the module docstring."""
    search: Search = schedule.fact("search", lambda: Search(schedule, ctx), of=replace(ctx, effort=0, trial=False))
    search = search if search.effort <= ctx.effort else Search(schedule, ctx)
    search.run(ctx.effort)
    report = PassReport("refine", counted=True)
    if search.best is None:
        return schedule, report
    moved = schedule.replace_order(search.best, reorder_collectives=ctx.reorder_collectives)
    moved = moved if ctx.trial else search.with_late_waits(moved)
    _explain(report, schedule, moved)
    return moved, report


@dataclass(frozen=True, slots=True)
class _Times:
    """The times of the order that a move leads to."""

    step_ns: float  # with collectives as estimated
    both_ns: float  # sum of that step and the step with late collectives
    exposed_ns: float

    @classmethod
    def of(cls, timings: Sequence[Timing]) -> _Times:
        """Take times from the replays: the first with collectives as estimated, the last with late ones."""
        return cls(timings[0].step_ns, timings[0].step_ns + timings[-1].step_ns, timings[0].exposed_ns)

    @property
    def cost(self) -> tuple[float, float]:
        """The same as `judge.cost`."""
        return self.both_ns, self.exposed_ns


class Search:
    """The search. Nodes are positions in the incoming schedule."""

    def __init__(self, schedule: Schedule, ctx: Context, seed: int = SEED) -> None:
        self.limit, self.checked = ctx.limit_bytes(schedule), ctx.check_memory
        self.final = ctx.final_bytes
        memory = analyze(schedule)
        self.peak_without_gain = min(self.limit, memory.peak_bytes)
        self.pool_bytes = memory.pool_bytes  # pools may not grow: their unused memory has no other use
        at_load = estimates_at_load(schedule, ctx.profile, ctx.timeline(schedule).step_ns)
        clock = schedule.with_estimates(at_load) if at_load else schedule
        self.clocks = [clock] if ctx.overlap_margin == 1 else [clock, ctx.late(clock)]
        self.ctx, self.order = ctx, Order(schedule, ctx, self.clocks)
        self.collectives = sorted({at for pair in schedule.started.items() for at in pair})
        self.compute = [at for at, node in enumerate(schedule.nodes) if node.kind in COMPUTE and ns_of(node) > 0]
        self.alike = _alike(schedule)
        self.random = random.Random(seed)  # only its `random()`, which is the same in every Python version
        self.repeats: list[tuple[int, int]] = []  # (node, distance) of moves to try next
        self.most_moves = ctx.most_moves
        count = len(self.collectives) + len(self.compute)
        self.effort = self.proposals = self.replays = 0
        self.blocks_before = self.order.blocks_replayed
        self.replays_in_round = count * min(EFFORT_PER_NODE, 4 * count)  # few nodes have few different moves
        self.now = _Times.of(self.order.timings)
        self._tries = self._alternate()
        self.made = 0
        self.best_cost = self.now.cost if self._is_final() else (inf, inf)
        self._best: list[int] | None = None  # the order of `best_cost`; None if no move led to it

    @property
    def best(self) -> list[str] | None:
        """The shortest order found that may be the final one, as names; None if no move led to one."""
        return None if self._best is None else [self.order.schedule.nodes[at].name for at in self._best]

    def with_late_waits(self, schedule: Schedule) -> Schedule:
        """Return `schedule`, in the best order, with waits moved towards their readers if neither times nor memory
        change: less compute then waits for a collective that ends later than estimated, because a rank is slow."""
        clocks = [clock.replace_order(self.best or ()) for clock in self.clocks]
        order, most = Order(schedule, self.ctx, clocks), inf if self.most_moves is None else self.most_moves
        cost, pool_bytes = _Times.of(order.timings).cost, analyze(schedule).pool_bytes
        for wait in sorted(schedule.started, reverse=True):
            last = min((order.position[after] for after in order.succs[wait]), default=len(order.order)) - 1
            move = order.shift(wait, min(last - order.position[wait], LATER), MOST_TOGETHER)
            if move is None or self.made >= most or order.peak_with(move) > order.peak_bytes:
                continue
            if order.pool_bytes_with(move) <= pool_bytes and _Times.of(tuple(order.timings_with(move))).cost == cost:
                order.make(move)
                most -= 1
        names = (schedule.nodes[at].name for at in order.order)
        return schedule.replace_order(names, reorder_collectives=self.ctx.reorder_collectives)

    def run(self, effort: int) -> None:
        """Search until this much effort is used up since the search began. A later call goes on from there."""
        self.effort = effort
        if self._in_c is None:
            while self.made != self.most_moves and self._used() < effort and next(self._tries, False):
                pass
            return
        found = self._in_c.run(effort, self.most_moves)
        self.now = _Times(found.step_ns, found.both_ns, found.exposed_ns)
        self.made, self.proposals, self.replays = found.made, found.proposals, found.replays
        self._best = found.best[: len(self.order.order)] if found.best else None

    @cached_property
    def _in_c(self) -> NativeSearch | None:
        """The same search in C, made when it first runs; None without a compiler, or if memory is checked."""
        replays = [replay for replay in self.order.replays if isinstance(replay, NativeReplay)]
        if self.checked or not replays:
            return None
        rules = {
            "collectives_share": COLLECTIVES_SHARE, "powers": POWERS, "most_together": MOST_TOGETHER,
            "worth_repeating": WORTH_REPEATING, "rounds_without_gain": ROUNDS_WITHOUT_GAIN,
            "proposals_per_replay": PROPOSALS_PER_REPLAY, "blocks_per_replay": BLOCKS_PER_REPLAY,
        }  # fmt: skip
        return NativeSearch(self, replays, rules)

    def _used(self) -> float:
        blocks = (self.order.blocks_replayed - self.blocks_before) / BLOCKS_PER_REPLAY
        return max(self.replays, self.proposals / PROPOSALS_PER_REPLAY, blocks)

    def _alternate(self) -> Iterator[bool]:
        """Alternate between random moves and exchanges; yield after each move that was tried."""
        without_gain = 0
        while self.collectives and without_gain < ROUNDS_WITHOUT_GAIN:
            began = self.now
            yield from self._draw_moves()
            while (yield from self._exchange()):
                pass
            without_gain = 0 if self.now.cost < began.cost else without_gain + 1

    def _draw_moves(self) -> Iterator[bool]:
        end = self.replays + self.replays_in_round
        for _ in range(PROPOSALS_PER_REPLAY * self.replays_in_round):
            if self.replays >= end:
                return
            repeated = bool(self.repeats)
            node, distance = self.repeats.pop() if repeated else self._draw_move()
            gained = self._try_move(self.order.shift(node, distance, MOST_TOGETHER))
            if not repeated and gained > WORTH_REPEATING:
                self.repeats = [(other, distance) for other in reversed(self.alike[node]) if other != node]
            yield True

    def _exchange(self) -> Generator[bool, None, bool]:
        """Exchange pairs of compute nodes, the closest pairs first; return whether the cost decreased."""
        compute = sorted(self.compute, key=self.order.position.__getitem__)
        began = self.now
        for distance in range(1, min(len(compute), 1 << POWERS)):
            for first in range(len(compute) - distance):
                one, other, made = compute[first], compute[first + distance], self.made
                self._try_move(self.order.exchange(one, other))
                if self.made > made:
                    compute[first], compute[first + distance] = other, one
                yield True
        return self.now.cost < began.cost

    def _try_move(self, move: Move | None) -> float:
        """Make a move unless it leads to a worse order; return the share of the step that it gains."""
        self.proposals += 1
        times = None if move is None else self._times_with(move)
        if move is None or times is None:
            return 0.0
        if self.order.peak_with(move) > (self.limit if times.cost < self.now.cost else self.peak_without_gain):
            return 0.0
        if self.order.pool_bytes_with(move) > self.pool_bytes:
            return 0.0
        gained = 1 - times.both_ns / self.now.both_ns if self.now.both_ns else 0.0
        self.order.make(move)
        self.made += 1
        self.now = times
        if times.cost < self.best_cost and self._is_final():
            self._best, self.best_cost = [*self.order.order], times.cost
        return gained

    def _is_final(self) -> bool:
        """Whether the present order may be the final one."""
        return self.final is None or self.order.peak_bytes <= self.final

    def _draw_move(self) -> tuple[int, int]:
        """Draw a node and the distance that it should move."""
        among = self.collectives if self.random.random() < COLLECTIVES_SHARE or not self.compute else self.compute
        node = among[int(self.random.random() * len(among))]
        most = 1 << int(self.random.random() * POWERS)
        distance = most + int(self.random.random() * most)
        return node, distance if self.random.random() < 0.5 else -distance

    def _times_with(self, move: Move) -> _Times | None:
        """Return the times that a move leads to; None if they are worse."""
        timings: list[Timing] = []
        for timing in self.order.timings_with(move):
            self.replays += 1
            timings.append(timing)
            if timings[0].step_ns > self.now.step_ns:
                return None  # without the replay with late collectives, which takes as long
        times = _Times.of(timings)
        return times if times.cost <= self.now.cost else None


def _explain(report: PassReport, before: Schedule, after: Schedule) -> None:
    """Report how far nodes moved, and why starts and waits that moved did not move further."""
    deps = dependencies.of(after)
    computing = list(accumulate((node.kind in COMPUTE and ns_of(node) > 0 for node in after.nodes), initial=0))
    for at, node in enumerate(after.nodes):
        positions = at - before.position(node.name)
        report.moved(node, positions)
        if not positions or node.kind not in (Kind.START, Kind.WAIT):
            continue
        start = node.kind is Kind.START
        other = max(deps.preds[at], default=-1) if start else min(deps.succs[at], default=len(after.nodes))
        low, high = (other + 1, at) if start else (at + 1, other)
        if computing[low] < computing[high]:
            report.because(node, Reason.REFINED)
        elif other in (-1, len(after.nodes)):
            report.because(node, Reason.SCHEDULE_START if start else Reason.SCHEDULE_END)
        else:
            why = deps.why[(other, at) if start else (at, other)]
            report.because(node, reason_of(why, of_wait=not start), after.nodes[other].name)


def _alike(schedule: Schedule) -> Sequence[Sequence[int]]:
    """Return for each node the nodes that do the same on buffers of the same sizes, itself included, in order."""
    kinds: dict[Hashable, list[int]] = {}
    groups: list[list[int]] = []
    for at, node in enumerate(schedule.nodes):
        about = schedule.nodes[schedule.started.get(at, at)]
        sizes = tuple(schedule.buffers[schedule.root(name)].bytes for name in (*node.reads, *node.writes))
        alike = kinds.setdefault((node.kind, about.op, about.queue, ns_of(about), sizes), [])
        alike.append(at)
        groups.append(alike)
    return groups
