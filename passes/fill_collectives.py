"""Greedy: run what leads to the next collective, start it, and fill its time with compute that is ready.

    a = kernel(x) : 50us; rs = reduce_scatter(a) @dp : 40us; s = wait(rs); y = kernel(s) : 9us; b = kernel(x) : 50us
 -> a = kernel(x) : 50us; rs = reduce_scatter(a) @dp : 40us; b = kernel(x) : 50us; s = wait(rs); y = kernel(s) : 9us

List scheduling by (first collective that a node blocks, original position) on the simulator's own clock. Not one of the
default passes: `refine` finds shorter steps without it. Where what is most urgent stands at a wait, ready compute that
is needed later may run:

- a collective that has not begun when a kernel comes begins behind that kernel (where the profile says so), so what
  fills its time begins with the shortest that is ready;
- each collective that is filled costs that kernel, so where compute is short it is better spent on a few. A step is
  made for each of `WAYS`: filling what can be filled, or only what can be filled to the end, while at other waits the
  stream stands still and compute is kept for later; by times as estimated, or as they are when collectives are late.
  What costs least is kept;
- compute that is kept holds memory: it runs as soon as the limit would be exceeded.

Keeps: data dependences, the memory limit, and the order of collectives on each process group.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence

from overlapc.estimators.simulator.machine import Machine, costs_of
from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.judge import cost, keep_if_better
from overlapc.passes.reasons import Reason
from overlapc.schedule import dependencies
from overlapc.schedule.memory import lifetimes
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Kind, Schedule

# (whether only waits that can be covered to their end are filled, whether collectives are taken to be late)
WAYS = ((False, True), (True, False), (True, True))
# The last kernel that fills a wait runs there if the wait takes this share of its time, else it is kept.
LAST_COVERS = 0.25
# How many ready nodes are looked at for the shortest, or for what frees memory: roughly the soonest needed.
LOOKED_AT = 64


@register_pass("fill_collectives")
def fill_collectives(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """The best of one pass over a ready list for each of `WAYS`; see the module."""
    return _best_of("fill_collectives", WAYS, schedule, ctx)


@register_pass("fill_any_waits")
def fill_any_waits(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """The same, whether the whole of a wait can be covered or not."""
    return _best_of("fill_any_waits", WAYS[:1], schedule, ctx)


@register_pass("fill_whole_waits")
def fill_whole_waits(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """The same, but only waits that can be covered to their end."""
    return _best_of("fill_whole_waits", WAYS[2:], schedule, ctx)


def _best_of(
    name: str, ways: Sequence[tuple[bool, bool]], schedule: Schedule, ctx: Context
) -> tuple[Schedule, PassReport]:
    best, best_report, best_cost = schedule, PassReport(name), cost(schedule, ctx)
    undone = best_report
    for whole, late in ways:
        report = PassReport(name)
        placed = Fill(schedule, ctx.late(schedule) if late else schedule, ctx, whole=whole).run()
        moved = schedule.replace_order(schedule.nodes[at].name for at in placed)
        for new, at in enumerate(placed):
            if schedule.nodes[at].kind in (Kind.START, Kind.WAIT):
                report.moved(schedule.nodes[at], new - at)
                if schedule.nodes[at].kind is Kind.WAIT and new > at:
                    report.because(schedule.nodes[at], Reason.FILLED)
        kept, said = keep_if_better(schedule, moved, ctx, report)
        if kept is schedule:
            undone = said
        elif cost(kept, ctx) < best_cost:
            best, best_report, best_cost = kept, said, cost(kept, ctx)
    return best, best_report if best is not schedule else undone


class Fill:
    """The list: ready nodes by how soon they are needed; waits are put off. Nodes are positions in the schedule."""

    def __init__(self, schedule: Schedule, clock: Schedule, ctx: Context, *, whole: bool) -> None:
        """clock: the same schedule with the times to go by. whole: only waits that can be covered to their end."""
        count = len(schedule.nodes)
        self.kinds = [node.kind for node in schedule.nodes]
        self.collective = schedule.started
        self.whole = whole
        self.deps = dependencies.of(schedule)
        self.costs = costs_of(clock, ctx.profile)
        self.machine = Machine(self.costs, [0.0] * count, [0.0] * count)
        self.missing = [len(preds) for preds in self.deps.preds]
        self.blocks = self._first_blocked()
        self.ready: list[tuple[int, int]] = []  # (first collective that it blocks, node): a heap, as are the others
        self.ready_ns = 0.0  # compute among them
        self.waits: list[tuple[int, int]] = []  # the same for waits
        self.waits_of: dict[int, list[int]] = {}  # collective in flight -> its waits that are ready
        self.in_flight: list[deque[int]] = [deque() for _ in range(self.costs.queues)]  # a queue's, in order
        self.free: deque[int] = deque()  # waits that cost nothing any more
        self.filling = -1  # the collective whose time is being filled
        self.done = [False] * count
        self.placed: list[int] = []
        self.limit = ctx.limit_bytes(schedule)
        self.life = lifetimes(schedule)
        self.left = [0] * len(self.life.roots)  # storage -> nodes that still touch it
        for storages in self.life.touches:
            for storage in storages:
                self.left[storage] += 1
        self.live = self.life.base_bytes

    def run(self) -> list[int]:
        """The new order, as positions in the old one."""
        for at, count in enumerate(self.missing):
            if not count:
                self._is_ready(at)
        while len(self.placed) < len(self.kinds):
            at = self._next()
            self._make_room(at)
            self._place(at)
        return self.placed

    def _first_blocked(self) -> list[int]:
        """For each node, the position of the first collective among what needs it (itself counts)."""
        count = len(self.kinds)
        blocks = [count] * count
        for at in range(count - 1, -1, -1):
            if self.kinds[at] in COMMUNICATION:
                blocks[at] = at
            for after in self.deps.succs[at]:
                blocks[at] = min(blocks[at], blocks[after])
        return blocks

    def _is_ready(self, at: int) -> None:
        if at in self.collective:
            heapq.heappush(self.waits, (self.blocks[at], at))
            if self.collective[at] in self.machine.in_flight:
                self.waits_of.setdefault(self.collective[at], []).append(at)
            else:
                self.free.append(at)
        else:
            heapq.heappush(self.ready, (self.blocks[at], at))
            self.ready_ns += self._compute_ns(at)

    def _compute_ns(self, at: int) -> float:
        return self.costs.ns[at] if self.kinds[at] in COMPUTE else 0.0

    # What comes next

    def _next(self) -> int:
        while self.free:
            at = self.free.popleft()
            if not self.done[at]:
                return at
        for heap in (self.ready, self.waits):
            while heap and self.done[heap[0][1]]:
                heapq.heappop(heap)
        if not self.ready:
            return self.waits[0][1]
        if not self.waits or self.ready[0][0] < self.waits[0][0]:
            return self.ready[0][1]
        # What is needed no later than the wait's result is never kept for another one.
        return self._filler(self.waits[0][1], may_keep=self.whole and self.ready[0][0] > self.waits[0][0])

    def _filler(self, wait: int, *, may_keep: bool) -> int:
        """What runs now that `wait`, on which the most urgent depends, is not done: ready compute, or the wait."""
        collective, machine = self.collective[wait], self.machine
        queue = self.costs.queue[collective]
        ready = [(self._compute_ns(at), at) for _, at in self.ready[:LOOKED_AT] if not self.done[at]]
        compute = [each for each in ready if each[0] > 0]
        lost_ns, shortest = 0.0, -1
        if compute and machine.held and machine.running[queue] is None:
            lost_ns, shortest = min(compute)
        gap_ns = self._gap_ns(collective, compute[0][1]) if compute else 0.0
        if may_keep and self.filling != collective and self.ready_ns - lost_ns < gap_ns:
            return wait
        self.filling = collective
        if shortest >= 0:
            return shortest
        if may_keep:
            compute_ns, last = min((each for each in compute if each[0] >= gap_ns), default=(0.0, -1))
            if compute_ns * LAST_COVERS > gap_ns:
                return wait
            if last >= 0:
                return last
        return self.ready[0][1]

    def _gap_ns(self, collective: int, beside: int) -> float:
        """How long a collective in flight still takes beside compute like that."""
        queue, costs, machine = self.costs.queue[collective], self.costs, self.machine
        left_ns = 0.0 if machine.running[queue] is None else machine.left[queue]
        for at, _ in machine.waiting[queue] if machine.running[queue] != collective else ():
            left_ns += costs.ns[at]
            if at == collective:
                break
        return left_ns * costs.mix(costs.load[beside], (costs.traffic[collective],))[1][0]

    # Placing it

    def _make_room(self, at: int) -> None:
        """Run what was kept, if it frees memory, before `at` exceeds the limit."""
        while self.live + self.life.allocates[at] + self.life.scratch[at] > self.limit:
            kept = [each for _, each in self.ready[:LOOKED_AT] if each != at and not self.done[each]]
            freed_bytes, first = max(((self._frees(each), -each) for each in kept), default=(0, 0))
            if freed_bytes <= 0:
                return
            self._place(-first)

    def _frees(self, at: int) -> int:
        gone = sum(self.life.bytes[storage] for storage in self.life.touches[at] if self.left[storage] == 1)
        return gone - self.life.allocates[at]

    def _place(self, at: int) -> None:
        self.placed.append(at)
        self.done[at] = True
        self.machine.run((at,))
        if self.kinds[at] is Kind.START:
            self.in_flight[self.costs.queue[at]].append(at)
        for queue in self.in_flight:
            while queue and queue[0] not in self.machine.in_flight:
                self.free.extend(self.waits_of.pop(queue.popleft(), ()))
        self.ready_ns -= self._compute_ns(at)
        self.live += self.life.allocates[at]
        for storage in self.life.touches[at]:
            self.left[storage] -= 1
            if not self.left[storage]:
                self.live -= self.life.bytes[storage]
        for after in self.deps.succs[at]:
            self.missing[after] -= 1
            if not self.missing[after]:
                self._is_ready(after)
