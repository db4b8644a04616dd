"""Greedy list scheduling: run the nodes that lead to the next collective, start it, overlap it with ready compute.

    a = kernel(x) : 50us; rs = reduce_scatter(a) @dp : 40us; s = wait(rs); y = kernel(s) : 9us; b = kernel(x) : 50us
 -> a = kernel(x) : 50us; rs = reduce_scatter(a) @dp : 40us; b = kernel(x) : 50us; s = wait(rs); y = kernel(s) : 9us

Nodes are ranked by (first collective that a node blocks, original position), and times are those of the simulator with
late collectives (`overlap_margin`). Not one of the default passes: `refine` finds shorter steps without it. While the
most urgent node would have to wait for a collective, ready compute that is needed later runs:

- A collective that has not begun when a kernel is issued begins after that kernel (if the profile says so). Therefore
  the shortest ready kernel runs first.
- Postponed compute may hold memory: it runs before the limit would be exceeded.

Keeps: data dependences, the memory limit, and the order of collectives on each process group.
"""

from __future__ import annotations

import heapq
from collections import deque

from overlapc.estimators.simulator.machine import Machine, costs_of
from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.judge import cost, keep_if_better
from overlapc.passes.reasons import Reason
from overlapc.schedule import dependencies
from overlapc.schedule.memory import Placing
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Kind, Schedule

# Number of ready nodes searched for the shortest, or for one that frees memory: roughly those needed first.
LOOKED_AT = 64


@register_pass("fill_collectives")
def fill_collectives(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Place all nodes from a list of ready nodes; see the module docstring."""
    report = PassReport("fill_collectives")
    placed = Fill(schedule, ctx).run()
    for new, at in enumerate(placed):
        node = schedule.nodes[at]
        if node.kind in (Kind.START, Kind.WAIT):
            report.moved(node, new - at)
            if node.kind is Kind.WAIT and new > at:
                report.because(node, Reason.FILLED)
    moved = schedule.replace_order(schedule.nodes[at].name for at in placed)
    if cost(moved, ctx) == cost(schedule, ctx):
        return schedule, PassReport("fill_collectives")
    return keep_if_better(schedule, moved, ctx, report)


class Fill:
    """The lists of ready nodes, by how soon they are needed; waits are postponed. Nodes are positions."""

    def __init__(self, schedule: Schedule, ctx: Context) -> None:
        count = len(schedule.nodes)
        self.kinds = [node.kind for node in schedule.nodes]
        self.collective = schedule.started
        self.deps = dependencies.of(schedule)
        self.costs = costs_of(ctx.late(schedule), ctx.profile)
        self.machine = Machine(self.costs, [0.0] * count, [0.0] * count)
        self.missing = [len(preds) for preds in self.deps.preds]
        self.blocks = self._first_blocked()
        self.ready: list[tuple[int, int]] = []  # a heap of (first collective that the node blocks, node)
        self.waits: list[tuple[int, int]] = []  # the same for waits
        self.waits_of: dict[int, list[int]] = {}  # collective in flight -> its waits that are ready
        self.in_flight: list[deque[int]] = [deque() for _ in range(self.costs.queues)]  # by queue, in order
        self.free: deque[int] = deque()  # ready waits whose collectives have ended
        self.done = [False] * count
        self.placed: list[int] = []
        self.limit = ctx.limit_bytes(schedule)
        self.memory = Placing(schedule)
        self.life = self.memory.life

    def run(self) -> list[int]:
        """Return the new order, as positions in the old one."""
        for at, count in enumerate(self.missing):
            if not count:
                self._is_ready(at)
        while len(self.placed) < len(self.kinds):
            at = self._next()
            self._make_room(at)
            self._place(at)
        return self.placed

    def _first_blocked(self) -> list[int]:
        """Return for each node the first collective that depends on it; a collective depends on itself."""
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
        return self._filler(self.waits[0][1])

    def _filler(self, wait: int) -> int:
        """Return the ready node that runs instead of `wait`, on which the most urgent node depends."""
        if self.machine.held and self.machine.running[self.costs.queue[self.collective[wait]]] is None:
            ready = (at for _, at in self.ready[:LOOKED_AT] if not self.done[at] and self.kinds[at] in COMPUTE)
            return min(((self.costs.ns[at], at) for at in ready if self.costs.ns[at] > 0), default=self.ready[0])[1]
        return self.ready[0][1]

    # Placing a node

    def _make_room(self, at: int) -> None:
        """Run postponed nodes that free memory if `at` would exceed the limit."""
        while self.memory.peak_at(at) > self.limit:
            postponed = [node for _, node in self.ready[:LOOKED_AT] if node != at and not self.done[node]]
            freed_bytes, first = max(
                ((self.memory.frees(node) - self.life.allocates[node], -node) for node in postponed), default=(0, 0)
            )
            if freed_bytes <= 0:
                return
            self._place(-first)

    def _place(self, at: int) -> None:
        self.placed.append(at)
        self.done[at] = True
        self.machine.run((at,))
        if self.kinds[at] is Kind.START:
            self.in_flight[self.costs.queue[at]].append(at)
        for queue in self.in_flight:
            while queue and queue[0] not in self.machine.in_flight:
                self.free.extend(self.waits_of.pop(queue.popleft(), ()))
        self.memory.place(at)
        for after in self.deps.succs[at]:
            self.missing[after] -= 1
            if not self.missing[after]:
                self._is_ready(after)
