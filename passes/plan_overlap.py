"""Start gathers in the order of need, early enough to be hidden; reductions in between; waits as late as possible.

    k = kernel(x) : 90us; rs = reduce_scatter(k) @dp : 60us; s = wait(rs)
    ag = all_gather(p) @dp : 60us; w = wait(ag); y = kernel(k, w) : 90us
 -> ag = all_gather(p) @dp : 60us; k = kernel(x) : 90us; rs = reduce_scatter(k) @dp : 60us
    w = wait(ag); y = kernel(k, w) : 90us; s = wait(rs)

One walk over the schedule that keeps the order of compute. A collective that needs only graph inputs and cheap work on
them (casts, views: the gather of a parameter) may start anywhere. It starts

- before the node during which it would become late. The time when it becomes late is counted back from the first reader
  of its result, leaving room for all later gathers on its queue, each at `Context.overlap_margin` times its estimate;
- before a collective on its queue that would still be running at that time (a large reduction that no node needs soon);
- if memory has room for it until it is needed, in addition to everything that is in flight already.

Waits are held back until a node needs them, memory runs out, or a start that depends on them would no longer stall
(an all-reduce behind its reduce-scatter).

Collectives pass each other, so this pass does nothing unless `Context.reorder_collectives` allows that. Keeps: data
dependences, barriers, the memory limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.judge import keep_if_better
from overlapc.passes.queues import CARRIED_SHARE, Queues
from overlapc.passes.reasons import Reason
from overlapc.passes.sink_waits import Sink
from overlapc.schedule.dependencies import Dependencies, Why
from overlapc.schedule.memory import GivenOrder, analyze
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Kind, Schedule

# When a gather is placed, it is not yet known what else will be in flight until it is needed. A plan that exceeds the
# limit is therefore made again with that much less memory for gathers, at most this many times in all.
ATTEMPTS = 4


@register_pass("plan_overlap")
def plan_overlap(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Plan until a plan fits into memory; see the module docstring."""
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
    for at, node in enumerate(schedule.nodes):
        if node.kind in (Kind.START, Kind.WAIT):
            plan.report.moved(node, moved.position(node.name) - at)
    return keep_if_better(schedule, moved, ctx, plan.report)


class _Plan(Sink):
    """A `Sink` that also decides when gathers start. Nodes are positions in the incoming schedule."""

    name = "plan_overlap"

    def __init__(self, schedule: Schedule, ctx: Context, room_bytes: int, dues: _Dues | None = None) -> None:
        """dues: those of an earlier plan of the same schedule, if there is one."""
        super().__init__(schedule, ctx)
        self.room = room_bytes
        self.done = [False] * len(schedule.nodes)
        self.busy_now = 0.0  # compute placed so far, without stalls: the clock of `_Dues.due`
        self.last: dict[str, int] = {}  # queue -> its last start so far
        self.starts: dict[int, None] = {}  # the starts in `held`
        self.dues = dues or _Dues.of(schedule, self.deps, self.queues)
        self.lifted = self.dues.lifted
        self.coming = {queue: list(starts) for queue, starts in self.dues.coming.items()}

    def run(self) -> list[int]:
        """Return the new order, as positions in the old one."""
        for at, node in enumerate(self.schedule.nodes):
            if at in self.lifted:
                continue
            self._release_starts(at)
            needs = [before for before in _preds(self.deps, at) if before in self.held]
            if node.kind is Kind.WAIT or (needs and self._sinks_along(at, needs)):
                self._hold(at, needs)
                if node.kind is Kind.START:
                    self.starts[at] = None
                continue
            self._release(needs, at)
            if node.kind in COMPUTE:
                for queue in self.coming:
                    self._issue_due(queue, self.busy_now + self.queues.compute_ns[at], at)
            elif node.kind is Kind.START:
                self._issue_before(at, at)
            self._place_arrived()
            self._make_room(at)
            self._place(at)
        for at in self.lifted:
            if not self.done[at]:
                self._place(at)
        return self._ended()

    # Starting

    def _issue_due(self, queue: str, until_ns: float, at: int) -> None:
        """Place the starts that would be late if not started before `until_ns`, as far as memory has room at `at`."""
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

    def _issue_before(self, start: int, at: int) -> None:
        """Place the starts that would be late if they came after `start`, which is next on its queue."""
        queue = self.schedule.nodes[start].queue
        if queue in self.coming:
            queued_ns = max(0.0, self.queues.end_ns[self.last[queue]] - self.now) if queue in self.last else 0.0
            self._issue_due(queue, self.busy_now + queued_ns + self.queues.collective_ns[start], at)

    def _fits(self, start: int, at: int) -> bool:
        """Whether memory has room for `start` from here, before `at`, to its old position; reports it if not."""
        if start <= at:
            return True
        new = [node for node in (start, *self.dues.free[start]) if not self.done[node]]
        needs = [self.dues.given.rise(at, start), *map(self.memory.needs, new)]
        if self.memory.peak_with(*map(sum, zip(*needs, strict=True))) <= self.room:
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
        self.starts.pop(at, None)
        super()._place(at)
        self.busy_now += self.queues.compute_ns[at]
        for wait in self.queues.closed_by.get(at, ()):
            if wait in self.waits:
                self._expect(wait)

    def _sinks_along(self, at: int, needs: list[int]) -> bool:
        return self.queues.kinds[at] is Kind.START or super()._sinks_along(at, needs)

    def _release_starts(self, at: int) -> None:
        """Place held starts whose waits no longer stall, in the order of the schedule, before `at`."""
        self._note_hidden()
        for start in tuple(self.starts):
            if start in self.held and all(wait not in self.waits or self._hidden(wait) for wait in self.behind[start]):
                self._issue_before(start, at)
                for held in self._with_needs([start]):
                    self._place(held)

    def _expect(self, wait: int) -> None:
        if self.done[self.queues.collective[wait]]:
            super()._expect(wait)

    def _hidden(self, wait: int) -> bool:
        return self.done[self.queues.collective[wait]] and super()._hidden(wait)


@dataclass(frozen=True)
class _Dues:
    """The free starts, which may stand anywhere, and when each becomes late. Nodes are positions."""

    free: Mapping[int, frozenset[int]]  # free start -> the nodes that move with it
    lifted: frozenset[int]  # all free starts, and all nodes that move with them
    due: Mapping[int, float]  # free start -> when it becomes late, on a clock without stalls
    coming: Mapping[str, Sequence[int]]  # queue -> its free starts, the first needed last
    given: GivenOrder  # live bytes of the incoming order

    @classmethod
    def of(cls, schedule: Schedule, deps: Dependencies, queues: Queues) -> _Dues:
        """Compute them for an incoming schedule."""
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
        return cls(free, lifted, due, coming, GivenOrder(schedule))


def _preds(deps: Dependencies, at: int) -> list[int]:
    """Return the nodes that `at` needs. The order of collectives, which may change here, is not a need."""
    return [before for before in deps.preds[at] if deps.why[before, at] is not Why.COLLECTIVE_ORDER]


def _free(schedule: Schedule, deps: Dependencies, queues: Queues) -> dict[int, frozenset[int]]:
    """Return the starts that depend only on graph inputs and cheap work on them, each with the nodes of that work."""
    free: dict[int, frozenset[int]] = {}
    cheap: list[bool] = []  # a node that a free start may take along
    for at, node in enumerate(schedule.nodes):
        clear = all(cheap[before] for before in _preds(deps, at))
        cheap.append(clear and node.kind in (*COMPUTE, Kind.VIEW, Kind.NOOP) and not node.mutates)
        if clear and node.kind is Kind.START:
            along = _along(at, deps, queues)
            if along is not None:
                free[at] = along
    return free


def _along(start: int, deps: Dependencies, queues: Queues) -> frozenset[int] | None:
    """Return the nodes that `start` needs; None if these take more time than may move along."""
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
    """Return the position of the first node that reads the result of `start`; that of its wait if no node does."""
    waits = queues.closed_by.get(start, ())
    readers = [after for wait in waits for after in deps.succs[wait]]
    return min(readers or waits, default=len(deps.preds))
