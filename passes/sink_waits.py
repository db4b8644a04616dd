"""Move every wait down to just before the first node that reads its result.

    ag0 = all_gather(%p0) @dp; %w0 = wait(ag0); %h = kernel(%x); %y = kernel(%h, %w0)
 -> ag0 = all_gather(%p0) @dp; %h = kernel(%x); %w0 = wait(ag0); %y = kernel(%h, %w0)

Views of the result move down with the wait, and so do cheap kernels on it (the scaling of a scattered gradient) while
the collective is still exposed. A later wait keeps the inputs of its collective in memory longer. To hide the
collective, memory may be used up to the limit, but once it is hidden, only up to the incoming peak.

Keeps: data dependences, the order of starts, the memory limit.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter

from overlapc.passes.base import Context, PassReport, register_pass
from overlapc.passes.judge import keep_if_better
from overlapc.passes.queues import CARRIED_SHARE, Queues
from overlapc.passes.reasons import Reason, reason_of
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.memory import Placing, analyze
from overlapc.schedule.model import COMPUTE, Kind, Schedule


@register_pass("sink_waits")
def sink_waits(schedule: Schedule, ctx: Context) -> tuple[Schedule, PassReport]:
    """Walk over the order once, and hold waits back until a node needs them or memory runs out."""
    sink = Sink(schedule, ctx)
    placed = sink.run()
    report = sink.report
    moved = schedule.replace_order(schedule.nodes[at].name for at in placed)
    for wait in schedule.waits():
        report.moved(wait, max(0, moved.position(wait.name) - schedule.position(wait.name)))
    return keep_if_better(schedule, moved, ctx, report)


class Sink:
    """The walk: nodes placed so far, nodes held back, the clock and the live bytes."""

    name = "sink_waits"

    def __init__(self, schedule: Schedule, ctx: Context) -> None:
        self.schedule = schedule
        self.report = PassReport(self.name)
        self.deps = dependencies.of(schedule)
        self.queues = Queues.of(schedule, ctx.timeline(schedule), ctx.overlap_margin)
        self.limit = ctx.limit_bytes(schedule)
        self.incoming_peak = analyze(schedule).peak_bytes
        self.memory = Placing(schedule)
        self.life = self.memory.life
        self.pools = any(self.life.in_pool)  # whether a wait can free memory of a pool
        self.held_on: Counter[int] = Counter()  # storage -> held nodes that touch it
        self.now = 0.0
        self.placed: list[int] = []
        self.held: dict[int, None] = {}  # waits, and nodes that sink with them, in their old order
        self.waits: dict[int, None] = {}  # the waits in `held`
        self.hidden: list[int] = []  # held waits whose collectives have ended by now, in their old order
        self.ends: list[tuple[float, int]] = []  # of other held waits, a heap of (end of the collective, wait)
        self.behind: dict[int, frozenset[int]] = {}  # held node -> the waits that it is held for
        self.along_ns: dict[int, float] = {}  # held node -> compute from those waits to its end

    def run(self) -> list[int]:
        """Return the new order, as positions in the old one."""
        for at, node in enumerate(self.schedule.nodes):
            needs = [before for before in self.deps.preds[at] if before in self.held]
            if node.kind is Kind.WAIT or (needs and self._sinks_along(at, needs)):
                self._hold(at, needs)
            else:
                self._release(needs, at)
                self._place_arrived()
                self._make_room(at)
                self._place(at)
        return self._ended()

    def _ended(self) -> list[int]:
        for at in self.waits:
            self.report.because(self.schedule.nodes[at], Reason.SCHEDULE_END)
        for at in tuple(self.held):
            self._place(at)
        return self.placed

    def _hold(self, at: int, needs: list[int]) -> None:
        self.held[at] = None
        self.behind[at] = frozenset().union(*(self.behind[before] for before in needs))
        if self.schedule.nodes[at].kind is Kind.WAIT:
            self.behind[at] |= {at}
        self.along_ns[at] = self._along_ns(at, needs)
        if self.schedule.nodes[at].kind is Kind.WAIT:
            self.waits[at] = None
            self._expect(at)
        self.memory.reserve(at)
        self.held_on.update(self.life.touches[at])

    def _place(self, at: int) -> None:
        if at in self.held:
            del self.held[at]
            if at in self.waits:
                del self.waits[at]
                if (hidden := bisect.bisect_left(self.hidden, at)) < len(self.hidden) and self.hidden[hidden] == at:
                    del self.hidden[hidden]
            self.memory.reserve(at, -1)
            self.held_on.subtract(self.life.touches[at])
        self.placed.append(at)
        self.now = self.queues.step(at, self.now)
        self.memory.place(at)

    def _release(self, wanted: list[int], reader: int) -> None:
        """Place held nodes, and held nodes that they need, because `reader` is next."""
        closure = self._with_needs(wanted)
        for at in closure:
            if at in self.waits:
                why = self.deps.why.get((at, reader), Why.DATA)
                reason = reason_of(why, of_wait=True)
                self.report.because(self.schedule.nodes[at], reason, self.schedule.nodes[reader].name)
        for at in closure:
            self._place(at)

    def _with_needs(self, wanted: list[int]) -> list[int]:
        needed: set[int] = set()
        stack = list(wanted)
        while stack:
            at = stack.pop()
            if at not in needed:
                needed.add(at)
                stack.extend(before for before in self.deps.preds[at] if before in self.held)
        return sorted(needed)

    def _sinks_along(self, at: int, needs: list[int]) -> bool:
        """Whether a node that needs held nodes should be held, too."""
        kind = self.schedule.nodes[at].kind
        if kind in (Kind.VIEW, Kind.NOOP):
            return True
        if kind not in COMPUTE or not self.queues.known[at]:
            return False
        waits = {wait for before in needs for wait in self.behind[before] if wait in self.waits}
        exposed = [wait for wait in waits if not self._hidden(wait)]
        if not exposed:
            return False
        longest = max(self.queues.collective_ns[self.queues.collective[wait]] for wait in exposed)
        return self._has_room(at, self.limit) and self._along_ns(at, needs) <= CARRIED_SHARE * longest

    def _along_ns(self, at: int, needs: list[int]) -> float:
        return self.queues.compute_ns[at] + max((self.along_ns[before] for before in needs), default=0.0)

    def _hidden(self, wait: int) -> bool:
        start = self.queues.collective[wait]
        return self.queues.known[start] and self.queues.end_ns[start] <= self.now

    def _expect(self, wait: int) -> None:
        """Record when the collective of a held wait ends, if its duration is known."""
        start = self.queues.collective[wait]
        if self.queues.known[start]:
            heapq.heappush(self.ends, (self.queues.end_ns[start], wait))

    def _note_hidden(self) -> None:
        """Add the waits whose collectives have ended by now to `hidden`."""
        while self.ends and self.ends[0][0] <= self.now:
            _, wait = heapq.heappop(self.ends)
            if wait in self.waits:
                bisect.insort(self.hidden, wait)

    def _place_arrived(self) -> None:
        """Place waits of copies that have ended, and their held readers, where that frees memory of a pool."""
        self._note_hidden()
        arrived = [wait for wait in self.hidden if self._frees_pool_memory(wait)] if self.pools else ()
        for at in tuple(self.held) if arrived else ():
            if at in self.held and all(wait in arrived or wait not in self.waits for wait in self.behind[at]):
                self._place(at)

    def _frees_pool_memory(self, wait: int) -> bool:
        """Whether only held nodes use pool memory of this wait's collective from now on."""
        pooled = (storage for storage in self.life.touches[wait] if self.life.in_pool[storage])
        return any(self.memory.left[storage] == self.held_on[storage] for storage in pooled)

    def _make_room(self, at: int) -> None:
        """Place waits whose collectives hold memory that `at` needs: hidden waits first, the oldest of them first."""
        if self._has_room(at, self.incoming_peak):
            return
        self._note_hidden()
        tried = 0  # position in `hidden`, which the loop changes
        while tried < len(self.hidden):
            wait = self.hidden[tried]
            self._place_waits_with(wait)
            if self._has_room(at, self.incoming_peak):
                return
            self._note_hidden()
            tried = bisect.bisect_right(self.hidden, wait)
        for wait in tuple(self.waits):
            if self._has_room(at, self.limit):
                return
            self._place_waits_with(wait)
        # Kernels that sank with placed waits are still held, and have memory to allocate.
        if not self._has_room(at, self.limit):
            for held in tuple(self.held):
                if held in self.waits:
                    self.report.because(self.schedule.nodes[held], Reason.MEMORY)
                self._place(held)

    def _has_room(self, at: int, most_bytes: int) -> bool:
        """Whether `at` may run now within `most_bytes`, counting what the held nodes will allocate."""
        return self.memory.peak_at(at) <= most_bytes

    def _place_waits_with(self, wait: int) -> None:
        """Place all waits of the collective of `wait`, if that frees memory."""
        waits = [at for at in self.queues.closed_by[self.queues.collective[wait]] if at in self.waits]
        if any(self.memory.left[storage] <= len(waits) for storage in self.life.touches[wait]):
            for at in self._with_needs(waits):
                if at in self.waits:
                    self.report.because(self.schedule.nodes[at], Reason.MEMORY)
                self._place(at)
