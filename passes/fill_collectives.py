"""Greedy: run what leads to the next collective, start it, and fill its time with compute that is ready.

    a = kernel(x) : 50us; rs = reduce_scatter(a) @dp : 40us; s = wait(rs); y = kernel(s) : 9us; b = kernel(x) : 50us
 -> a = kernel(x) : 50us; rs = reduce_scatter(a) @dp : 40us; b = kernel(x) : 50us; s = wait(rs); y = kernel(s) : 9us

List scheduling by (first collective that a node blocks, whether it is a wait, original position): the third of three
greedy modes beside `raise_collectives` and `sink_waits`, and the only one that moves compute. After each start, ready
compute is placed, soonest needed first, until it lasts as long as everything on that queue. Knows no memory: it is
undone when that exceeds the limit or the step simulates slower.

Keeps: data dependences, and the order of collectives on each process group.
"""

from __future__ import annotations

import heapq

from overlapc.passes.base import Context, PassReport, keep_if_better, register_pass
from overlapc.passes.queues import Queues
from overlapc.passes.reasons import Reason
from overlapc.schedule import dependencies
from overlapc.schedule.model import Kind, Schedule


@register_pass("fill_collectives")
def fill_collectives(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """One pass over a ready list; see the module."""
    report = PassReport("fill_collectives")
    placed = _Fill(schedule, ctx).run()
    moved = schedule.replace_order(schedule.nodes[at].name for at in placed)
    for new, at in enumerate(placed):
        if schedule.nodes[at].kind in (Kind.START, Kind.WAIT):
            report.moved(schedule.nodes[at], new - at)
            if schedule.nodes[at].kind is Kind.WAIT and new > at:
                report.because(schedule.nodes[at], Reason.FILLED)
    return keep_if_better(schedule, moved, ctx, report)


class _Fill:
    """Ready nodes in two heaps: what may be placed any time, and waits, which are put off."""

    def __init__(self, schedule: Schedule, ctx: Context) -> None:
        self.nodes = schedule.nodes
        self.deps = dependencies.of(schedule)
        self.queues = Queues.of(schedule, ctx.timeline(schedule), ctx.overlap_margin)
        self.missing = [len(preds) for preds in self.deps.preds]
        self.blocks = self._first_blocked()
        self.ready: list[tuple[int, int]] = []
        self.waits: list[tuple[float, int, int]] = []
        self.now = 0.0
        self.placed: list[int] = []

    def run(self) -> list[int]:
        """The new order, as positions in the old one."""
        for at, count in enumerate(self.missing):
            if not count:
                self._is_ready(at)
        while self.ready or self.waits:
            # A wait whose collective is done costs nothing; one that is not, only when nothing else is left.
            if self.waits and (not self.ready or self.waits[0][0] <= self.now):
                self._place(heapq.heappop(self.waits)[2])
            else:
                self._place(heapq.heappop(self.ready)[1])
        return self.placed

    def _first_blocked(self) -> list[int]:
        """For each node, the position of the first collective among what needs it (itself counts)."""
        count = len(self.nodes)
        blocks = [count] * count
        for at in range(count - 1, -1, -1):
            if self.nodes[at].kind in (Kind.START, Kind.COMM):
                blocks[at] = at
            for after in self.deps.succs[at]:
                blocks[at] = min(blocks[at], blocks[after])
        return blocks

    def _is_ready(self, at: int) -> None:
        if self.nodes[at].kind is Kind.WAIT and at in self.queues.collective:
            end_ns = self.queues.end_ns[self.queues.collective[at]]
            heapq.heappush(self.waits, (end_ns, self.blocks[at], at))
        else:
            heapq.heappush(self.ready, (self.blocks[at], at))

    def _place(self, at: int) -> None:
        self.placed.append(at)
        self.now = self.queues.step(at, self.now)
        for after in self.deps.succs[at]:
            self.missing[after] -= 1
            if not self.missing[after]:
                self._is_ready(after)
