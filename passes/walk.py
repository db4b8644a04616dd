"""The walk that raising and sinking share: it moves nodes that put collectives in flight towards the first position.

A `Walk` visits these nodes in order and moves each over one node after the other, until a `Reason` stops it: its
collective begins early enough to be hidden, or would only wait on its queue if it began earlier; it needs the node in
front; memory has no room; or another collective would be exposed. "Early enough" takes later collectives into account:
a gather must also leave room on its queue for the gathers behind it. Cheap nodes that it needs (views, casts) move too.

Seen from its end, a step is again a step: a wait puts its collective in flight, and the start waits for it. So waits
sink by exactly the same rules (`Direction.LATER`); only some reasons have other names.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Sequence
from enum import Enum

from overlapc.estimators.timeline import Timeline
from overlapc.passes.base import Context, PassReport
from overlapc.passes.judge import keep_if_better
from overlapc.passes.queues import CARRIED_SHARE, Queues
from overlapc.passes.reasons import Reason, reason_of
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Dependencies, Why
from overlapc.schedule.memory import MemoryTimeline
from overlapc.schedule.model import COMPUTE, Kind, Schedule

# A move changes which nodes overlap, and so the durations that the decision was based on. Replaying and walking
# again converges within a few rounds; there is another round only if the last one gained this share of the step.
ROUNDS = 4
WORTH_IT = 0.001


class Direction(Enum):
    """The direction in which nodes move."""

    EARLIER = "earlier"  # starts, towards the first node
    LATER = "later"  # waits, towards the last


# Seen from the end, a wait is a start. These reasons, found for such a start, have other names for the wait.
_NAMES_FOR_WAITS = {Reason.SCHEDULE_START: Reason.SCHEDULE_END, Reason.QUEUE: Reason.NEXT_ON_QUEUE}


def walk_in_rounds(name: str, schedule: Schedule, ctx: Context, direction: Direction) -> tuple[Schedule, PassReport]:
    """Walk over the schedule until a walk moves nothing or gains too little; the simulator judges each walk."""
    report = PassReport(name, counted=True)
    limit = ctx.limit_bytes(schedule)
    current, timeline = schedule, ctx.timeline(schedule)
    for _ in range(ROUNDS):
        left = None if ctx.most_moves is None else ctx.most_moves - len(report.moves)
        moved, latest = Walk(name, current, timeline, limit, dataclasses.replace(ctx, most_moves=left), direction).run()
        if moved is current:
            _merge(report, latest)
            break
        if left is None or len(latest.moves) < left:
            accepted, latest = keep_if_better(current, moved, ctx, latest)
        else:
            accepted = moved  # only part of a walk (`stop_after`): whether it pays off does not matter
        if accepted is current:
            if current is schedule:
                _merge(report, latest)
            break
        _merge(report, latest)
        before, current, timeline = timeline, accepted, ctx.timeline(accepted)
        if timeline.step_ns > before.step_ns * (1 - WORTH_IT):
            break
    return current, report


def _merge(report: PassReport, latest: PassReport) -> None:
    report.reasons.update(latest.reasons)
    report.limits.update(latest.limits)
    for name, positions in latest.moves.items():
        report.moved(name, positions, latest.moved_with.get(name, ()))


class _DirectedOrder:
    """An order and its memory, read from the first node or, mirrored, from the last."""

    def __init__(self, memory: MemoryTimeline, direction: Direction) -> None:
        self._memory = memory
        self._mirrored = direction is Direction.LATER
        # Mirrored, node i and position i are called n - 1 - i, so the initial order is the identity here, too.
        self.order = list(memory.order) if self._mirrored else memory.order
        self.position = list(memory.position) if self._mirrored else memory.position

    def real(self, node: int) -> int:
        """Return a node's position in the given schedule."""
        return len(self.order) - 1 - node if self._mirrored else node

    def peak_with(self, low: int, nodes: Sequence[int]) -> int:
        """Return the peak in bytes at the positions from `low` on if `nodes`, which stand there, had this order."""
        return self._memory.try_window(*self._window(low, nodes))

    def put(self, low: int, nodes: Sequence[int]) -> None:
        """Put `nodes`, which stand at the positions from `low` on, into this order there."""
        self._memory.apply(*self._window(low, nodes))
        if self._mirrored:
            self.order[low : low + len(nodes)] = nodes
            for at, node in enumerate(nodes, low):
                self.position[node] = at

    def _window(self, low: int, nodes: Sequence[int]) -> tuple[int, Sequence[int]]:
        if not self._mirrored:
            return low, nodes
        return len(self.order) - low - len(nodes), [self.real(node) for node in reversed(nodes)]


def _mirrored(deps: Dependencies) -> Dependencies:
    top = len(deps.preds) - 1

    def turned(lists: Sequence[Sequence[int]]) -> list[list[int]]:
        return [[top - at for at in ats] for ats in reversed(lists)]

    why = {(top - after, top - before): why for (before, after), why in deps.why.items()}
    return Dependencies(turned(deps.succs), turned(deps.preds), why)


class Walk:
    """One walk. Nodes are positions in the initial order, and collectives are as in `Queues`; both are counted from
    the end if waits sink, so that every move here is towards position 0."""

    def __init__(
        self, name: str, schedule: Schedule, timeline: Timeline, limit_bytes: int, ctx: Context, direction: Direction
    ) -> None:
        later = direction is Direction.LATER
        self.schedule = schedule
        self.limit = limit_bytes
        self.most_moves = ctx.most_moves
        self.reorder = ctx.reorder_collectives and not later  # waits have no order that may change
        deps, queues = dependencies.of(schedule), Queues.of(schedule, timeline, ctx.overlap_margin)
        self.deps = _mirrored(deps) if later else deps
        self.queues = queues.mirrored() if later else queues
        self.later = later
        self.line = _DirectedOrder(MemoryTimeline(schedule, check=ctx.check_memory), direction)
        self.report = PassReport(name)
        count = len(schedule.nodes)
        # Clocks before each position: `busy` without stalls at waits, `clock` with them, valid up to `walked`.
        self.busy = [0.0] * (count + 1)
        for at in range(count):
            self.busy[at + 1] = self.busy[at] + self.queues.compute_ns[at]
        self.clock = [0.0] * (count + 1)
        self.walked = 0
        self.deadline: dict[int, float] = {}
        for collective in sorted({*self.queues.opened_by, *self.queues.closed_by}, reverse=True):
            self.deadline[collective] = self._deadline(collective)

    def run(self) -> tuple[Schedule, PassReport]:
        """Return the schedule after the walk, and the report about every node that it visited."""
        moved = 0
        for node in [at for at, kind in enumerate(self.queues.kinds) if kind is Kind.START]:
            if moved == self.most_moves:
                break
            moved += self._move(node)
        names = [self._name(node) for node in self.line.order]
        if self.later:
            names.reverse()
        return self.schedule.replace_order(names, reorder_collectives=self.reorder), self.report

    def _name(self, node: int) -> str:
        return self.schedule.nodes[self.line.real(node)].name

    # When each collective has to begin

    def _deadline(self, collective: int) -> float:
        """Return the latest begin of a collective, on the clock without stalls, that leaves nothing exposed.

        The collective must end before its wait, and before the next one on its queue has to begin, unless that one
        cannot begin so early in any case. Must be computed from the last collective to the first.
        """
        if self.queues.kinds[collective] is Kind.COMM:
            return self.busy[self.line.position[collective]]
        if not self.queues.known[collective]:
            return -math.inf
        end = self.busy[self._closing_position(collective)]
        following = self.queues.next.get(collective)
        if following is not None:
            end = min(end, max(self.deadline[following], self._earliest(following)))
        return end - self.queues.collective_ns[collective]

    def _closing_position(self, collective: int) -> int:
        """Return the position of a collective's first wait; the end of the schedule if it has none."""
        closing = (self.line.position[node] for node in self.queues.closed_by.get(collective, ()))
        return min(closing, default=len(self.line.order))

    def _earliest(self, collective: int) -> float:
        """Return the earliest begin of a collective that dependences allow, on the clock without stalls."""
        if self.queues.kinds[collective] is Kind.COMM:
            return self.busy[self.line.position[collective]]
        return max((self._earliest_of(node) for node in self.queues.opened_by.get(collective, ())), default=-math.inf)

    def _earliest_of(self, opening: int) -> float:
        room_ns = CARRIED_SHARE * self._collective_ns(opening)
        later = [-before for before in self.deps.preds[opening]]  # a heap: the last of them first
        heapq.heapify(later)
        seen = set(later)
        while later:
            before = -heapq.heappop(later)
            if self.deps.why.get((before, opening)) is Why.COLLECTIVE_ORDER:
                continue
            room_ns -= self.queues.compute_ns[before]
            if room_ns < 0 or not self._is_cheap(before, opening):
                return self.busy[self.line.position[before] + 1]
            for further in self.deps.preds[before]:
                if -further not in seen:
                    seen.add(-further)
                    heapq.heappush(later, -further)
        return 0.0

    def _collective_ns(self, node: int) -> float:
        return self.queues.collective_ns[self.queues.collective[node]]

    def _is_cheap(self, node: int, opening: int) -> bool:
        """Whether a node that `opening` needs is cheap enough to move with it."""
        kind = self.queues.kinds[node]
        if kind in (Kind.VIEW, Kind.NOOP):
            return True
        if kind not in COMPUTE or not self.queues.known[node]:
            return False
        return self.queues.compute_ns[node] <= CARRIED_SHARE * self._collective_ns(opening)

    # Moving one node

    def _move(self, opening: int) -> bool:
        """Move one node as far as pays off; return whether it moved."""
        line, order = self.line, self.line.order
        collective = self.queues.collective[opening]
        origin = line.position[opening]
        self._walk_to(origin)
        block = [opening]
        carried_ns = 0.0
        low = origin  # the position where the block would begin
        while True:
            stop = self._stop(collective, low, carried_ns)
            if stop is not None:
                break
            above = order[low - 1]
            needed = self._needed_by(above, block)
            passes_over = needed is Why.COLLECTIVE_ORDER and self.reorder
            if passes_over:
                if carried_ns:  # passing collectives is considered (in `_stop`) only for a start that moves alone
                    stop = (Reason.WOULD_EXPOSE, above)
                    break
                needed = None
            if needed is not None:
                cost = self.queues.compute_ns[above]
                most_ns = CARRIED_SHARE * self._collective_ns(opening)
                if not self._is_cheap(above, opening) or carried_ns + cost > most_ns:
                    stop = (reason_of(needed, of_wait=self.later), above)
                    break
                block.insert(0, above)
                carried_ns += cost
            else:
                if carried_ns and self._would_expose(above, low - 1, carried_ns):
                    stop = (Reason.WOULD_EXPOSE, above)
                    break
                window = [*block, above]
                if line.peak_with(low - 1, window) > self.limit:
                    stop = (Reason.MEMORY, None)
                    break
                line.put(low - 1, window)
                if passes_over:
                    self.queues.swap(above, collective)
                    self.deadline[above] = self._deadline(above)
                    self.deadline[collective] = self._deadline(collective)
            low -= 1
        reason, about = stop
        name = self._name(opening)
        if self.later:
            reason = _NAMES_FOR_WAITS.get(reason, reason)
        self.report.because(name, reason, "" if about is None else self._name(about))
        moved = origin - line.position[opening]
        if moved:
            self.report.moved(name, moved, [self._name(node) for node in block[:-1]])
            self._rewalk(low, origin)
        return moved > 0

    def _stop(self, collective: int, low: int, carried_ns: float) -> tuple[Reason, int | None] | None:
        """Return why moving further than `low` gains nothing, and the node that is the reason; None if it may gain."""
        if self.busy[low] + carried_ns <= self.deadline[collective]:
            return Reason.HIDDEN, None
        if low > 0 and self.clock[low] + carried_ns <= self.queues.queue_free_ns(collective):
            previous = self.queues.previous[collective]
            if not (self.reorder and not carried_ns and self._pays_to_pass(collective, previous)):
                return Reason.QUEUE, previous
        return (Reason.SCHEDULE_START, None) if low == 0 else None

    def _needed_by(self, above: int, block: list[int]) -> Why | None:
        """Return the kind of dependence that keeps the block from passing the node above it, or None."""
        whys = [self.deps.why[above, at] for at in block if (above, at) in self.deps.why]
        before = self.queues.previous.get(self.queues.collective[block[-1]])
        if self.queues.kinds[above] is Kind.START and self.queues.collective[above] == before:
            # There is no edge between the two if collectives that stood between them were passed.
            whys.append(Why.COLLECTIVE_ORDER)
        return min(whys, key=lambda why: why.value, default=None)

    def _would_expose(self, above: int, at: int, carried_ns: float) -> bool:
        """Whether the collective that `above` opens would be exposed if the carried nodes no longer overlapped it."""
        queues = self.queues
        if queues.kinds[above] is not Kind.START:
            return False
        collective = queues.collective[above]
        cover = self.busy[self._closing_position(collective)] - self.busy[at] - carried_ns
        delay = max(0.0, queues.queue_free_ns(collective) - self.clock[at] - carried_ns)
        return delay + queues.collective_ns[collective] > cover

    def _pays_to_pass(self, start: int, above: int) -> bool:
        """Whether the compute stream stalls less if `start`, now directly behind `above`, goes ahead of it.

        Times count from the position of `above`. Its wait is assumed to sink to the first node that needs it.
        """
        queues, at = self.queues, self.line.position[above]
        if queues.kinds[above] is not Kind.START:
            return False
        free_ns = max(0.0, queues.queue_free_ns(above) - self.clock[at])
        start_ns, above_ns = queues.collective_ns[start], queues.collective_ns[above]
        start_cover = self.busy[self._closing_position(start)] - self.busy[at]
        above_cover = self.busy[self._due_position(above)] - self.busy[at]
        both_ns = free_ns + start_ns + above_ns
        now = max(0.0, free_ns + above_ns - above_cover, both_ns - start_cover)
        then = max(0.0, free_ns + start_ns - start_cover, both_ns - above_cover)
        return then < now

    def _due_position(self, start: int) -> int:
        """Return the position of the first node that needs a start's result, except views and cheap work on the
        result, which sink with its wait."""
        due = len(self.line.order)
        stack = [after for wait in self.queues.closed_by.get(start, ()) for after in self.deps.succs[wait]]
        while stack:
            node = stack.pop()
            if self.queues.kinds[node] in (Kind.VIEW, Kind.NOOP):
                stack.extend(self.deps.succs[node])
            elif self._is_cheap(node, start):
                further = (self.line.position[after] for after in self.deps.succs[node])
                due = min(due, min(further, default=due))
            else:
                due = min(due, self.line.position[node])
        return due

    # Clocks

    def _walk_to(self, at: int) -> None:
        """Compute `clock` up to a position."""
        order, clock, step = self.line.order, self.clock, self.queues.step
        for position in range(self.walked, at):
            clock[position + 1] = step(order[position], clock[position])
        self.walked = max(self.walked, at)

    def _rewalk(self, low: int, high: int) -> None:
        """Recompute both clocks for the positions from `low` to `high`, whose nodes changed places."""
        order, queues = self.line.order, self.queues
        for position in range(low, high + 1):
            node = order[position]
            self.busy[position + 1] = self.busy[position] + queues.compute_ns[node]
            self.clock[position + 1] = queues.step(node, self.clock[position])
        self.walked = max(self.walked, high + 1)
