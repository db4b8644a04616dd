"""Gathers soonest-needed first, far enough ahead; reductions in the gaps; waits as late as they may be.

    k = kernel(x) : 90us; rs = reduce_scatter(k) @dp : 60us; s = wait(rs)
    ag = all_gather(p) @dp : 60us; w = wait(ag); y = kernel(k, w) : 90us
 -> ag = all_gather(p) @dp : 60us; k = kernel(x) : 90us; rs = reduce_scatter(k) @dp : 60us
    w = wait(ag); y = kernel(k, w) : 90us; s = wait(rs)

One walk over the schedule that keeps the order of compute. A collective that needs nothing but inputs and cheap work on
them (casts, views: the gather of a parameter) may start anywhere; it starts

- before the node during which it would become late: counted back from the first reader of its result over all the
  gathers that are needed before that one, each taking `Context.overlap_margin` times its estimate;
- before a collective on its queue that would still be running then (a large reduction that nobody waits for);
- if memory has room until it is needed, beside everything that is in flight already.

Waits are held back until something needs them, memory runs out, or a start depends on them and costs no wait any more
(an all-reduce behind its reduce-scatter).

Moves collectives past each other, so it does nothing unless `Context.reorder_collectives` allows that. Keeps: data
dependences, barriers, the memory limit.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.judge import keep_if_better
from overlapc.passes.queues import CARRIED_SHARE, Queues
from overlapc.passes.reasons import Reason
from overlapc.passes.sink_waits import Sink
from overlapc.schedule.dependencies import Dependencies, Why
from overlapc.schedule.memory import Lifetimes, RangeMax, analyze
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Kind, Schedule

# What is in flight later than a gather was let in is only known when it is there; a plan that exceeds the limit is
# made again with that much less to give away.
ATTEMPTS = 4


@register_pass("plan_overlap")
def plan_overlap(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Plans until one fits; see the module."""
    if not ctx.reorder_collectives:
        return schedule, PassReport("plan_overlap")
    limit = room = ctx.limit_bytes(schedule)
    dues = None
    for _ in range(ATTEMPTS):
        plan = _Plan(schedule, ctx, room, dues)
        dues = plan.dues
        names = [schedule.nodes[at].name for at in plan.run()]
        moved = schedule.replace_order(names, reorder_collectives=True)
        over = analyze(moved).peak_bytes - limit
        if over <= 0:
            break
        room -= over
    position = {name: at for at, name in enumerate(names)}
    for at, node in enumerate(schedule.nodes):
        if node.kind in (Kind.START, Kind.WAIT):
            plan.report.moved(node, position[node.name] - at)
    return keep_if_better(schedule, moved, ctx, plan.report)


class _Plan(Sink):
    """`Sink` that also decides when gathers start. Nodes are positions in the schedule as it came."""

    name = "plan_overlap"

    def __init__(self, schedule: Schedule, ctx: Context, room_bytes: int, dues: _Dues | None = None) -> None:
        """dues: of an earlier plan of the same schedule."""
        super().__init__(schedule, ctx)
        self.room = room_bytes
        self.done = [False] * len(schedule.nodes)
        self.busy_now = 0.0  # compute placed so far, stalls not counted: the clock that dues are on
        self.last: dict[str, int] = {}  # queue -> its last start
        # Starts that are held for waits go when all of these are hidden or placed. Each looks at one that is not.
        self.looking_at: dict[int, list[int]] = {}  # wait -> starts
        self.may_go: list[int] = []  # a heap
        self.dues = dues or _Dues.of(schedule, self.deps, self.queues, self.life)
        self.lifted = self.dues.lifted
        self.coming = {queue: list(starts) for queue, starts in self.dues.coming.items()}

    def run(self) -> list[int]:
        """The new order, as positions in the old one."""
        for at, node in enumerate(self.schedule.nodes):
            if at in self.lifted:
                continue
            self._release_hidden_for_starts()
            needs = [before for before in _preds(self.deps, at) if before in self.held]
            if node.kind is Kind.WAIT or (needs and self._sinks_along(at, needs)):
                self._hold(at, needs)
                if node.kind is Kind.START:
                    self._look(at)
                continue
            self._release(needs, at)
            if node.kind in COMPUTE:
                for queue in self.coming:
                    self._issue_due(queue, self.busy_now + self.queues.compute_ns[at], at)
            elif node.kind is Kind.START:
                self._issue_before(at)
            self._read_arrived()
            self._make_room(at)
            self._place(at)
        for at in self.lifted:
            if not self.done[at]:
                self._place(at)
        for at in self.waits:
            self.report.because(self.schedule.nodes[at], Reason.SCHEDULE_END)
        for at in tuple(self.held):
            self._place(at)
        return self.placed

    # Starting

    def _issue_due(self, queue: str, until_ns: float, at: int) -> None:
        """Start what would be late if it did not start before `until_ns`, as far as memory has room at `at`."""
        coming = self.coming[queue]
        while coming:
            start = coming[-1]
            if self.done[start]:
                coming.pop()
                continue
            if self.dues.due[start] > until_ns or not self._fits(start, at):
                return
            reason = Reason.HIDDEN if self.dues.due[start] >= self.busy_now else Reason.SCHEDULE_START
            self.report.because(self.schedule.nodes[start], reason)
            self._place(start)

    def _issue_before(self, start: int) -> None:
        """Start what would be late behind `start`, which is next on its queue."""
        queue = self.schedule.nodes[start].queue
        if queue in self.coming:
            free_ns = max(self.now, self._queue_free_ns(queue)) + self.queues.collective_ns[start]
            self._issue_due(queue, self.busy_now + free_ns - self.now, start)

    def _queue_free_ns(self, queue: str) -> float:
        return self.queues.end_ns[self.last[queue]] if queue in self.last else 0.0

    def _fits(self, start: int, at: int) -> bool:
        """Whether memory has room for `start` from here, before `at`, to where it stood; notes when it has not."""
        if start <= at:
            return True
        new = [node for node in (start, *self.dues.free[start]) if not self.done[node]]
        size = sum(self.life.allocates[node] + self.life.scratch[node] for node in new)
        beside = self.memory.live - self.dues.usual_before[at]
        if self.dues.usual_during.most(at, start) + beside + size <= self.room:
            return True
        self.report.because(self.schedule.nodes[start], Reason.MEMORY)
        return False

    # Placing

    def _place(self, at: int) -> None:
        for before in _preds(self.deps, at):
            if before in self.lifted and not self.done[before]:
                self._place(before)
        kind = self.queues.kinds[at]
        if kind in COMMUNICATION:
            queue = self.schedule.nodes[at].queue
            if queue in self.last:
                self.queues.previous[at] = self.last[queue]
            else:
                self.queues.previous.pop(at, None)
            self.last[queue] = at
        self.done[at] = True
        super()._place(at)
        self.busy_now += self.queues.compute_ns[at]
        for wait in self.queues.closed_by.get(at, ()):
            if wait in self.waits:
                self._expect(wait)

    def _sinks_along(self, at: int, needs: list[int]) -> bool:
        if self.queues.kinds[at] is Kind.START:
            return True
        return super()._sinks_along(at, needs)

    def _release_hidden_for_starts(self) -> None:
        """Starts that were held for waits go when those are free of charge; what is urgent on their queue first."""
        self._note_hidden()
        while self.may_go:
            for at in self._with_needs([heapq.heappop(self.may_go)]):
                if at in self.held:
                    self._place(at)

    def _look(self, start: int) -> None:
        """Let a held start look at a wait that keeps it from going; without one it may go."""
        waits = (wait for wait in self.behind[start] if wait in self.waits and not self._hidden(wait))
        wait = min(waits, default=None)
        if wait is None:
            heapq.heappush(self.may_go, start)
        else:
            self.looking_at.setdefault(wait, []).append(start)

    def _let_go(self, wait: int) -> None:
        super()._let_go(wait)
        for start in self.looking_at.pop(wait, ()):
            self._look(start)

    def _expect(self, wait: int) -> None:
        if self.done[self.queues.collective[wait]]:
            super()._expect(wait)

    def _hidden(self, wait: int) -> bool:
        return self.done[self.queues.collective[wait]] and super()._hidden(wait)


@dataclass(frozen=True)
class _Dues:
    """What may start anywhere, and when it has to. Nodes are positions."""

    free: Mapping[int, frozenset[int]]  # start that may stand anywhere -> what comes along
    lifted: frozenset[int]  # all of these
    due: Mapping[int, float]  # free start -> when it becomes late, on the clock of compute alone
    coming: Mapping[str, Sequence[int]]  # queue -> free starts, soonest needed last
    usual_during: RangeMax  # bytes while each node runs
    usual_before: Sequence[int]  # and just before it

    @classmethod
    def of(cls, schedule: Schedule, deps: Dependencies, queues: Queues, life: Lifetimes) -> _Dues:
        """Of a schedule as it came."""
        nodes = schedule.nodes
        free = _free(schedule, deps, queues)
        lifted = frozenset(free).union(*free.values())
        busy = [0.0]
        for at in range(len(nodes)):
            busy.append(busy[-1] + (0.0 if at in lifted else queues.compute_ns[at]))
        needed = {at: _needed(at, deps, queues) for at in free}
        due: dict[int, float] = {}
        coming: dict[str, list[int]] = {}
        latest: dict[str, float] = {}
        for at in sorted(free, key=lambda at: (needed[at], at), reverse=True):
            queue = nodes[at].queue
            end = min(busy[needed[at]], latest.get(queue, busy[-1]))
            due[at] = latest[queue] = end - queues.collective_ns[at]
            coming.setdefault(queue, []).append(at)
        during = analyze(schedule).during_bytes
        before = [during[at] - life.allocates[at] - life.scratch[at] for at in range(len(nodes))]
        return cls(free, lifted, due, coming, RangeMax(during), before)


def _preds(deps: Dependencies, at: int) -> list[int]:
    """What `at` needs; the order of collectives is not kept here."""
    return [before for before in deps.preds[at] if deps.why[before, at] is not Why.COLLECTIVE_ORDER]


def _free(schedule: Schedule, deps: Dependencies, queues: Queues) -> dict[int, frozenset[int]]:
    """Starts that depend on inputs and cheap work on them only, and that work."""
    free: dict[int, frozenset[int]] = {}
    light: list[bool] = []  # a node that a free start may take along
    for at, node in enumerate(schedule.nodes):
        clear = all(light[before] for before in _preds(deps, at))
        light.append(clear and node.kind in (*COMPUTE, Kind.VIEW, Kind.NOOP) and not node.mutates)
        if clear and node.kind is Kind.START:
            along = _along(at, deps, queues)
            if along is not None:
                free[at] = along
    return free


def _along(start: int, deps: Dependencies, queues: Queues) -> frozenset[int] | None:
    """What `start` needs; None if that is more work than it may take along."""
    allowed_ns = CARRIED_SHARE * queues.collective_ns[start]
    along: set[int] = set()
    stack = [start]
    while stack:
        for before in _preds(deps, stack.pop()):
            if before not in along:
                allowed_ns -= queues.compute_ns[before]
                if allowed_ns < 0:
                    return None
                along.add(before)
                stack.append(before)
    return frozenset(along)


def _needed(start: int, deps: Dependencies, queues: Queues) -> int:
    """Position of the first node that reads a result; that of its wait if nobody does."""
    waits = queues.closed_by.get(start, ())
    readers = [after for wait in waits for after in deps.succs[wait]]
    return min(readers or waits, default=len(deps.preds))
