"""Start each collective early enough to be hidden, within the memory limit.

    %h = kernel(%x) : 100us; ag0 = all_gather(%p0) @dp : 80us; %w0 = wait(ag0); %y = kernel(%h, %w0)
 -> ag0 = all_gather(%p0) @dp : 80us; %h = kernel(%x) : 100us; %w0 = wait(ag0); %y = kernel(%h, %w0)

Walks collectives in order and moves each start up, node by node, until one of `Reason` stops it: it begins
early enough, beginning sooner would only wait in its queue, it needs the node above, memory has no room, or
another collective would be exposed. "Early enough" looks ahead: a gather also has to make room on its queue for the
gathers behind it. What a start needs and is cheap (views, casts) moves with it as a group.

A start without an estimate is never known to be hidden: it moves up as far as the other reasons allow.

Where `Context.reorder_collectives` allows it, a start also passes an earlier, independent one of its group if that
exposes less in all: in an FSDP backward every gather stands behind the scatter of the layer before, and can
only be prefetched past it. Ranks have to agree on the final order then, as they do when it is compared.

Keeps: data dependences, the memory limit, and otherwise the order of collectives on each process group.
"""

from __future__ import annotations

import heapq
import math

from overlapc.estimators.timeline import Timeline
from overlapc.passes.base import Context, PassReport, keep_if_better, register_pass
from overlapc.passes.queues import CARRIED_SHARE, COMPUTE, Queues
from overlapc.passes.raise_collectives import reason_of
from overlapc.passes.reasons import Reason
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.memory import MemoryTimeline
from overlapc.schedule.model import Kind, Schedule

# Raising changes who runs beside whom, and so the durations that raising was decided by. Replaying and
# going over it again settles within a few rounds; each has to gain this share of the step to be worth it.
ROUNDS = 4
WORTH_IT = 0.001


@register_pass("raise_under_memory")
def raise_under_memory(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Rounds of raising, each judged by the simulator; see the module."""
    report = PassReport("raise_under_memory")
    limit = ctx.limit_bytes(schedule)
    current, timeline = schedule, ctx.timeline(schedule)
    for _ in range(ROUNDS):
        moved, said = _Round(current, timeline, limit, ctx).run()
        if moved is current:
            _merge(report, said)
            break
        kept, said = keep_if_better(current, moved, ctx, said)
        if kept is current:
            if current is schedule:
                _merge(report, said)
            break
        _merge(report, said)
        before, current, timeline = timeline, kept, ctx.timeline(kept)
        if timeline.step_ns > before.step_ns * (1 - WORTH_IT):
            break
    return current, report


def _merge(report: PassReport, said: PassReport) -> None:
    report.reasons.update(said.reasons)
    report.limits.update(said.limits)
    for name, positions in said.moves.items():
        report.moved(name, positions, said.moved_with.get(name, ()))


class _Round:
    """One walk over the collectives. Nodes are positions in the order that the round began with."""

    def __init__(self, schedule: Schedule, timeline: Timeline, limit_bytes: int, ctx: Context) -> None:
        self.schedule = schedule
        self.reorder = ctx.reorder_collectives
        self.limit = limit_bytes
        self.deps = dependencies.of(schedule)
        self.queues = Queues(schedule, timeline, ctx.overlap_margin)
        self.memory = MemoryTimeline(schedule, check=ctx.check_memory)
        self.report = PassReport("raise_under_memory")
        count = len(schedule.nodes)
        # Clocks before each position: compute alone, and with the stalls at waits as far as the walk has come.
        self.busy = [0.0] * (count + 1)
        for at in range(count):
            self.busy[at + 1] = self.busy[at] + self.queues.compute_ns[at]
        self.clock = [0.0] * (count + 1)
        self.walked = 0
        self.deadline = self._deadlines()

    def run(self) -> tuple[Schedule, PassReport]:
        """The raised schedule and what was said about each start."""
        changed = False
        for start in [at for at, kind in enumerate(self.queues.kinds) if kind is Kind.START]:
            changed |= self._raise(start)
        if not changed:
            return self.schedule, self.report
        names = [self.schedule.nodes[at].name for at in self.memory.order]
        return self.schedule.replace_order(names, reorder_collectives=self.reorder), self.report

    # When each collective has to begin

    def _deadlines(self) -> dict[int, float]:
        """The latest begin of each collective, on the clock of compute alone, that leaves nothing exposed.

        From the last to the first: it has to end before its wait, and before the next on its queue has to begin,
        unless that one cannot begin so soon anyhow.
        """
        deadline: dict[int, float] = {}
        for at in range(len(self.queues.kinds) - 1, -1, -1):
            if self.queues.kinds[at] is Kind.COMM:
                deadline[at] = self.busy[at]
            elif self.queues.kinds[at] is Kind.START:
                deadline[at] = self._deadline(at, deadline)
        return deadline

    def _deadline(self, start: int, deadline: dict[int, float]) -> float:
        if not self.queues.known[start]:
            return -math.inf
        end = self.busy[self._wait_position(start)]
        following = self.queues.next.get(start)
        if following is not None:
            end = min(end, max(deadline[following], self._earliest(following)))
        return end - self.queues.collective_ns[start]

    def _wait_position(self, start: int) -> int:
        """Where the wait of a start is now; the end of the schedule if there is none."""
        waits = self.queues.waits_of.get(start)
        return min(self.memory.position[wait] for wait in waits) if waits else len(self.memory.order)

    def _earliest(self, start: int) -> float:
        """Compute that has to run before this start, as a clock: what its dependences alone allow."""
        if self.queues.kinds[start] is Kind.COMM:
            return self.busy[self.memory.position[start]]
        room_ns = CARRIED_SHARE * self.queues.collective_ns[start]
        later = [-before for before in self.deps.preds[start]]  # a heap: the lowest of them first
        heapq.heapify(later)
        seen = set(later)
        while later:
            before = -heapq.heappop(later)
            if self.deps.why.get((before, start)) is Why.COLLECTIVE_ORDER:
                continue
            room_ns -= self.queues.compute_ns[before]
            if room_ns < 0 or not self._is_cheap(before, start):
                return self.busy[self.memory.position[before] + 1]
            for further in self.deps.preds[before]:
                if -further not in seen:
                    seen.add(-further)
                    heapq.heappush(later, -further)
        return 0.0

    def _is_cheap(self, node: int, start: int) -> bool:
        """Whether a node that `start` needs may move up with it."""
        kind = self.queues.kinds[node]
        if kind in (Kind.VIEW, Kind.NOOP):
            return True
        if kind not in COMPUTE or not self.queues.known[node]:
            return False
        return self.queues.compute_ns[node] <= CARRIED_SHARE * self.queues.collective_ns[start]

    # Raising one

    def _raise(self, start: int) -> bool:
        """Move one start up as far as pays; whether it moved."""
        memory, order = self.memory, self.memory.order
        origin = memory.position[start]
        self._walk_to(origin)
        block = [start]
        carried_ns = 0.0
        low = origin  # where the block would begin
        while True:
            stop = self._stop(start, low, carried_ns)
            if stop is not None:
                break
            above = order[low - 1]
            needed = self._needed_by(above, block)
            passes_over = needed is Reason.COLLECTIVE_ORDER and self.reorder
            if passes_over:
                if carried_ns or not self._pays_to_pass(start, above):
                    stop = (Reason.WOULD_EXPOSE, above)
                    break
                needed = None
            if needed is not None:
                cost = self.queues.compute_ns[above]
                if not self._is_cheap(above, start) or (
                    carried_ns + cost > CARRIED_SHARE * self.queues.collective_ns[start] and cost > 0
                ):
                    stop = (needed, above)
                    break
                block.insert(0, above)
                carried_ns += cost
            else:
                if carried_ns and self._would_expose(above, low - 1, carried_ns):
                    stop = (Reason.WOULD_EXPOSE, above)
                    break
                window = [*block, above]
                if memory.try_window(low - 1, window) > self.limit:
                    stop = (Reason.MEMORY, None)
                    break
                memory.apply(low - 1, window)
                if passes_over:
                    self.queues.swap(above, start)
                    self.deadline[above] = self._deadline(above, self.deadline)
                    self.deadline[start] = self._deadline(start, self.deadline)
            low -= 1
        reason, about = stop
        name = self.schedule.nodes[start].name
        self.report.because(name, reason, "" if about is None else self.schedule.nodes[about].name)
        moved = origin - memory.position[start]
        if moved:
            self.report.moved(name, moved, [self.schedule.nodes[at].name for at in block[:-1]])
            self._rewalk(low, origin)
        return moved > 0

    def _stop(self, start: int, low: int, carried_ns: float) -> tuple[Reason, int | None] | None:
        """Why there is no use in going further up than `low`, or None."""
        if self.busy[low] + carried_ns <= self.deadline[start]:
            return Reason.HIDDEN, None
        if low > 0 and self.clock[low] + carried_ns <= self.queues.queue_free_ns(start):
            previous = self.queues.previous[start]
            if not (self.reorder and not carried_ns and self._pays_to_pass(start, previous)):
                return Reason.QUEUE, previous
        return (Reason.SCHEDULE_START, None) if low == 0 else None

    def _needed_by(self, above: int, block: list[int]) -> Reason | None:
        """Why the block cannot pass the node above it, or None."""
        whys = [self.deps.why[above, at] for at in block if (above, at) in self.deps.why]
        if self.queues.kinds[above] is Kind.START and self.queues.previous.get(block[-1]) == above:
            # No edge says so when collectives that stood between the two were passed.
            whys.append(Why.COLLECTIVE_ORDER)
        return reason_of(min(whys, key=lambda why: why.value)) if whys else None

    def _would_expose(self, above: int, at: int, carried_ns: float) -> bool:
        """Whether taking compute out from beside the collective that starts at `above` would expose it."""
        queues = self.queues
        if queues.kinds[above] is not Kind.START:
            return False
        cover = self.busy[self._wait_position(above)] - self.busy[at] - carried_ns
        delay = max(0.0, queues.queue_free_ns(above) - self.clock[at] - carried_ns)
        return delay + queues.collective_ns[above] > cover

    def _pays_to_pass(self, start: int, above: int) -> bool:
        """Whether the stream stands still for less if `start`, now right behind it, goes ahead of `above`.

        Times count from where `above` stands. Its wait may still sink to what needs it, and is taken to.
        """
        queues, at = self.queues, self.memory.position[above]
        if queues.kinds[above] is not Kind.START:
            return False
        free_ns = max(0.0, queues.queue_free_ns(above) - self.clock[at])
        start_ns, above_ns = queues.collective_ns[start], queues.collective_ns[above]
        start_cover = self.busy[self._wait_position(start)] - self.busy[at]
        above_cover = self.busy[self._due_position(above)] - self.busy[at]
        both_ns = free_ns + start_ns + above_ns
        now = max(0.0, free_ns + above_ns - above_cover, both_ns - start_cover)
        then = max(0.0, free_ns + start_ns - start_cover, both_ns - above_cover)
        return then < now

    def _due_position(self, start: int) -> int:
        """The first node that needs the result of a start; views and cheap work on it sink with its wait."""
        due = len(self.memory.order)
        stack = [after for wait in self.queues.waits_of.get(start, ()) for after in self.deps.succs[wait]]
        while stack:
            node = stack.pop()
            if self.queues.kinds[node] in (Kind.VIEW, Kind.NOOP):
                stack.extend(self.deps.succs[node])
            elif self._is_cheap(node, start):
                further = (self.memory.position[after] for after in self.deps.succs[node])
                due = min(due, min(further, default=due))
            else:
                due = min(due, self.memory.position[node])
        return due

    # Clocks

    def _walk_to(self, at: int) -> None:
        """Bring `clock` up to a position."""
        order, clock, step = self.memory.order, self.clock, self.queues.step
        for position in range(self.walked, at):
            clock[position + 1] = step(order[position], clock[position])
        self.walked = max(self.walked, at)

    def _rewalk(self, low: int, high: int) -> None:
        """Both clocks again for positions low..high, whose nodes changed places."""
        order, queues = self.memory.order, self.queues
        for position in range(low, high + 1):
            node = order[position]
            self.busy[position + 1] = self.busy[position] + queues.compute_ns[node]
            self.clock[position + 1] = queues.step(node, self.clock[position])
        self.walked = max(self.walked, high + 1)
