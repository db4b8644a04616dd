"""Last moves: whatever the simulator says makes the step shorter, then what hides more in a step about as short.

    a = kernel(x) : 9us; rs = reduce_scatter(a) @dp : 9us; s = wait(rs); y = kernel(s) : 9us; b = kernel(x) : 9us
 -> a = kernel(x) : 9us; rs = reduce_scatter(a) @dp : 9us; b = kernel(x) : 9us; s = wait(rs); y = kernel(s) : 9us

Where the stream stands still at a wait, these are tried, nearest first:

- compute from behind the wait goes before it, and compute from before the start goes there too;
- the wait goes later, and the start earlier, past other starts of its group where that is allowed.

Then every start goes a little later or earlier: a collective that is hidden still slows what runs beside it, some
compute more than other (`estimators/contention.py`).

What a node needs and costs next to nothing (views, casts) moves with it. Each move is judged by a replay of the whole
step (`estimators/incremental.py`), on times as estimated and on late collectives, and kept if that costs less
(`judge.cost`) within the memory limit and is no slower as estimated than what came in. Goes round until nothing helps.

Last, a second goal: steps within `judge.TIE` of the shortest are the same for all that estimates can tell, and of
these the one that exposes least is best. So moves around what is exposed are tried once more, for that.

Keeps: data dependences, the memory limit, and the order of collectives on each process group unless it may change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, pairwise

from overlapc.estimators.incremental import Replay, Timing
from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.judge import TIE, keep_if_better
from overlapc.passes.queues import CARRIED_SHARE
from overlapc.passes.reasons import Reason
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.memory import MemoryTimeline
from overlapc.schedule.model import COMPUTE, Kind, Schedule

# Moves of a kind that are tried on one schedule, each some tenths of a millisecond; fewer where nodes are many.
TRIES = 1000
TRIES_TIMES_NODES = 4_000_000
# Compute nodes that are moved on either side of a wait, of so many nodes there: the casts that a layer's gather needs
# stand right before it, and the next layer's may fill this one's time.
NEAR = 12
LOOKED_AT = 400
# Collectives that an exposed one may have to wait for on its queue, and that are moved too.
BEFORE = 3
# How far a start or a wait is moved, in compute nodes.
STEPS = (1, 2, 4, 8, 16, 32)

_Window = tuple[int, int, list[int]]  # a node, and the move that is about it, as in `Replay.try_window`
_Move = Callable[[int, int], Iterator[_Window]]
_Goal = Callable[[Sequence[Timing]], tuple[float, float]]


def _both_ns(timings: Sequence[Timing]) -> float:
    return sum(each.step_ns for each in timings)


def _shortest(timings: Sequence[Timing]) -> tuple[float, float]:
    """`judge.cost`, of replays as estimated and (the last) with late collectives."""
    return _both_ns(timings), timings[0].exposed_ns


def _least_exposed(timings: Sequence[Timing]) -> tuple[float, float]:
    return timings[0].exposed_ns, _both_ns(timings)


@register_pass("polish")
def polish(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Rounds over what is exposed; see the module."""
    search = Polish(schedule, ctx)
    search.run()
    names = [schedule.nodes[at].name for at in search.replays[0].order]
    moved = schedule.replace_order(names, reorder_collectives=ctx.reorder_collectives)
    return keep_if_better(schedule, moved, ctx, search.report)


class Polish:
    """An order that changes, its memory and its timing. Nodes are positions in the schedule as it came."""

    def __init__(self, schedule: Schedule, ctx: Context) -> None:
        self.schedule = schedule
        self.report = PassReport("polish", counted=True)
        self.most_moves = ctx.most_moves
        self.limit = ctx.limit_bytes(schedule)
        self.deps = dependencies.of(schedule)
        self.kinds = [node.kind for node in schedule.nodes]
        self.ns = [0.0 if node.estimate is None else node.estimate.ns for node in schedule.nodes]
        self.free_order = ctx.reorder_collectives
        clocks = [schedule] if ctx.overlap_margin == 1 else [schedule, ctx.late(schedule)]
        self.replays = [Replay(clock, ctx.profile) for clock in clocks]
        self.memory = MemoryTimeline(schedule, check=ctx.check_memory)
        self.order, self.position = self.replays[0].order, self.replays[0].position
        self.waits: dict[int, list[int]] = {}
        for wait, start in schedule.started.items():
            self.waits.setdefault(start, []).append(wait)
        self.most_tries = min(TRIES, TRIES_TIMES_NODES // max(1, len(schedule.nodes)))
        self.tries = 0
        self.moves = 0
        # What the goal may not cost: a step longer than this as estimated, and as estimated and late together.
        self.goal: _Goal = _shortest
        self.most_ns = self._timings()[0].step_ns
        self.most_both_ns = math.inf

    def run(self) -> None:
        """Make the step short, then hide more of it; see the module."""
        came_in_ns = _both_ns(self._timings())
        self._around_exposed()
        self._beside_other_compute()
        shortest = self._timings()
        self.goal = _least_exposed
        self.most_ns = min(self.most_ns, shortest[0].step_ns * (1 + TIE))
        self.most_both_ns = min(came_in_ns, _both_ns(shortest) * (1 + TIE))
        self._around_exposed()

    def _timings(self) -> list[Timing]:
        return [replay.timing for replay in self.replays]

    def _around_exposed(self) -> None:
        """Moves around each exposed collective, the most exposed first, in rounds until nothing helps."""
        self.tries, helped = self.most_tries, True
        while helped and self._may_go_on():
            helped = False
            exposed = {**self.replays[-1].exposed, **self.replays[0].exposed}
            for start in sorted(exposed, key=lambda at: (-exposed[at], at)):
                while self._may_go_on() and self._improve(start, self._candidates):
                    helped = True

    def _beside_other_compute(self) -> None:
        """Every start a little later or earlier, in rounds until nothing helps."""
        self.tries, helped = self.most_tries, True
        while helped and self._may_go_on():
            helped = False
            for start in [at for at in self.order if at in self.waits]:
                while self._may_go_on() and self._improve(start, self._shifts):
                    helped = True

    def _may_go_on(self) -> bool:
        return self.tries > 0 and (self.most_moves is None or self.moves < self.most_moves)

    def _improve(self, start: int, moves: _Move) -> bool:
        """Make the first of the moves around a collective that the goal is nearer after."""
        if start not in self.waits:  # it waits for itself, or nobody for it
            return False
        wait = min(self.waits[start], key=self.position.__getitem__)
        best = self.goal(self._timings())
        for node, low, nodes in moves(start, wait):
            if not self._may_go_on():
                return False
            self.tries -= 1
            if self._is_nearer(best, low, nodes) and self.memory.try_window(low, nodes) <= self.limit:
                self._make(node, low, nodes, start)
                return True
        return False

    def _is_nearer(self, best: tuple[float, float], low: int, nodes: Sequence[int]) -> bool:
        """Whether a move leads nearer to the goal than `best`, in a step that is short enough."""
        timings: list[Timing] = []
        for replay in self.replays:
            timings.append(replay.try_window(low, nodes))
            if timings[0].step_ns > self.most_ns:
                return False  # before collectives are late as well: that replay takes as long
        return self.goal(timings) < best and _both_ns(timings) <= self.most_both_ns

    def _make(self, node: int, low: int, nodes: Sequence[int], start: int) -> None:
        before = self.position[node]
        for replay in self.replays:
            replay.apply(low, nodes)
        self.memory.apply(low, nodes)
        self.moves += 1
        name = self.schedule.nodes[node].name
        self.report.moved(name, self.position[node] - before)
        own = node == start or node in self.waits[start]
        self.report.because(name, Reason.POLISHED_ITSELF if own else Reason.POLISHED, self.schedule.nodes[start].name)

    # Moves

    def _candidates(self, start: int, wait: int) -> Iterator[_Window]:
        """Moves that may let the stream stand still for less at a wait."""
        at = self.position[wait]
        yield from islice(self._each(self._earlier, range(at + 1, len(self.order)), at), NEAR)
        yield from islice(self._each(self._later, range(self.position[start] - 1, -1, -1), at), NEAR)
        for to in self._distances(range(at + 1, len(self.order))):
            yield from self._later(wait, to)
        queue = self._queue_up_to(start)
        for each, ahead in pairwise(queue):
            yield from self._earlier(each, self.position[ahead])
        for each in queue:
            at = self.position[each]
            for to in self._distances(range(at - 1, -1, -1)):
                yield from self._earlier(each, to)
            yield from islice(self._each(self._later, range(at - 1, -1, -1), at + 1), NEAR)

    def _shifts(self, start: int, wait: int) -> Iterator[_Window]:
        """The start a little later, up to its wait, and a little earlier."""
        at = self.position[start]
        for to in self._distances(range(at + 1, self.position[wait] + 1)):
            yield from self._later(start, to)
        for to in self._distances(range(at - 1, -1, -1)):
            yield from self._earlier(start, to)

    def _queue_up_to(self, start: int) -> list[int]:
        """A collective, and those before it on its queue."""
        queue = self.schedule.nodes[start].queue
        found = [start]
        for at in range(self.position[start] - 1, -1, -1):
            if len(found) > BEFORE:
                break
            node = self.order[at]
            if self.kinds[node] is Kind.START and self.schedule.nodes[node].queue == queue:
                found.append(node)
        return found

    def _each(self, move: _Move, positions: range, to: int) -> Iterator[_Window]:
        """`move` to `to` of the compute nodes at these positions that it is legal for."""
        for at in positions[:LOOKED_AT]:
            node = self.order[at]
            if self.kinds[node] in COMPUTE and self.ns[node] > 0:
                yield from move(node, to)

    def _distances(self, positions: range) -> list[int]:
        """Positions so many compute nodes away."""
        found: list[int] = []
        passed = 0
        for at in positions:
            passed += self.kinds[self.order[at]] in COMPUTE
            if passed in STEPS[len(found) :]:
                found.append(at)
            if len(found) == len(STEPS):
                break
        return found

    def _earlier(self, node: int, to: int) -> Iterator[_Window]:
        """`node` and what it needs moved to before position `to`, if that is legal."""
        group = self._along(node, self.deps.preds, lambda other: self.position[other] >= to)
        if group is not None:
            stays = [other for other in self.order[to : self.position[node] + 1] if other not in group]
            yield node, to, [*sorted(group, key=self.position.__getitem__), *stays]

    def _later(self, node: int, to: int) -> Iterator[_Window]:
        """`node` and what needs it moved to right before position `to`, if that is legal."""
        group = self._along(node, self.deps.succs, lambda other: self.position[other] < to)
        if group is not None:
            low = self.position[node]
            stays = [other for other in self.order[low:to] if other not in group]
            yield node, low, [*stays, *sorted(group, key=self.position.__getitem__)]

    def _along(self, node: int, edges: Sequence[Sequence[int]], in_the_way: Callable[[int], bool]) -> set[int] | None:
        """`node` and what has to move with it; None where that is more than next to nothing."""
        group = {node}
        stack = [node]
        allowed_ns = CARRIED_SHARE * self.ns[node]
        while stack:
            one = stack.pop()
            for other in edges[one]:
                if other in group or not in_the_way(other):
                    continue
                if self.free_order and self.deps.why.get((other, one)) is Why.COLLECTIVE_ORDER:
                    continue
                allowed_ns -= self.ns[other]
                if not self._is_light(other) or allowed_ns < 0:
                    return None
                group.add(other)
                stack.append(other)
        return group

    def _is_light(self, node: int) -> bool:
        """Whether it may move with another at all: nothing of which nobody knows how long it takes."""
        kind = self.kinds[node]
        known = kind in COMPUTE and self.schedule.nodes[node].estimate is not None
        return known or kind in (Kind.VIEW, Kind.NOOP)
