"""Fuses kernels that share memory traffic.

Each round tries candidate pairs, the best first, until a round fuses nothing. Candidates share a buffer: a reader and
its producer (vertical) or two readers (horizontal). `legality` decides which pairs may merge, and gives a reason for
every refusal.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from overlapc.fusion.cuts import cut
from overlapc.fusion.kernel_groups import Group, Groups
from overlapc.fusion.legality import LoopChanges, verdict
from overlapc.fusion.live import Beside, nothing_beside
from overlapc.fusion.merge import Refusal, same_space
from overlapc.fusion.mixed_order import crosses
from overlapc.fusion.report import FusionReport
from overlapc.fusion.score import Score, score
from overlapc.fusion.simplify import simplified
from overlapc.ir.body import Body
from overlapc.ir.conversions import numbers_last, rounded_once
from overlapc.ir.ops import IROp, Loops, LoweredGraph, Refuse, nothing_refused
from overlapc.ir.template import once_for_all_buffers

NEIGHBOURS = 8  # next readers of a buffer with which a reader is paired: keeps candidates linear in the graph
FARTHEST = 512  # most positions between two readers of a pair: fusing more distant ones lengthens live ranges
# First with loops unchanged, then with crossing loops, then with reordered loops.
ROUNDS = (LoopChanges(), LoopChanges(across=True), LoopChanges(across=True, reorders=True))


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """The measured time and register spills of a kernel."""

    ns: float
    spills: int = 0  # spilled registers of a GPU kernel


Measure = Callable[[Loops], KernelTiming | str]  # a kernel's timing, or why there is none


def fuse(
    ops: Sequence[IROp],
    graph: LoweredGraph,
    freeable: Collection[str] = (),
    seed: int | None = None,
    measure: Measure | None = None,
    refuse: Refuse = nothing_refused,
    beside: Beside = nothing_beside,
) -> tuple[list[IROp], FusionReport]:
    """Return `ops` with kernels fused, in a legal order, and a report of fusions and refusals.

    freeable: inputs that only the graph holds.
    seed: try candidates in random order; tests show that every order gives the same results.
    measure: a fusion is done only if its kernel is faster than the two alone and spills no registers.
    refuse: why the device's generator cannot generate a kernel, or None; refused kernels are not created.
    beside: memory in use beside that of `ops`.
    """
    fuser = Fuser(ops, graph, freeable, None if seed is None else random.Random(seed), measure, refuse, beside)
    fuser.run()
    fuser.simplify()
    return fuser.groups.ops(), fuser.finished()


class Fuser:
    """One run of fusion."""

    def __init__(
        self,
        ops: Sequence[IROp],
        graph: LoweredGraph,
        freeable: Collection[str] = (),
        shuffle: random.Random | None = None,
        measure: Measure | None = None,
        refuse: Refuse = nothing_refused,
        beside: Beside = nothing_beside,
    ) -> None:
        self.groups = Groups(ops, graph, freeable, beside)
        self.measure = measure
        self.refuse = refuse
        self.shuffle = shuffle
        self.report = FusionReport()
        self.changes = ROUNDS[0]  # loop changes of the current round
        self.settled: set[tuple[int, int, int, int, int]] = set()  # keys of refused attempts, see `_attempt`

    def run(self) -> None:
        """Run rounds until no kernels fuse, for each entry of `ROUNDS`, then again with split loops."""
        self._rounds()
        if self._cut():
            self._rounds()

    def _rounds(self) -> None:
        for self.changes in ROUNDS:
            while self.round():
                pass

    def _cut(self) -> bool:
        """Split the loops of every kernel for which the result can be generated; whether any was split."""
        found = False
        for group in self.groups:
            if not isinstance(group.op, Loops):
                continue
            body = cut(group.op.body)
            if body is not group.op.body and self.refuse(group.op.device, body) is None:
                group.op = dataclasses.replace(group.op, body=body)
                group.grown += 1
                found = True
        return found

    def simplify(self) -> None:
        """Simplify the body of every kernel; no other kernel may be fused into it afterwards."""
        for group in self.groups:
            if isinstance(group.op, Loops):
                group.op = dataclasses.replace(group.op, body=_final(group.op.body) or group.op.body)

    def finished(self) -> FusionReport:
        """Return the report of all rounds, without refusals of kernels that were fused later in another way."""
        group_of = {name: group for group in self.groups for name in group.members}
        self.report.refused = {
            (a, b): refusal for (a, b), refusal in self.report.refused.items() if group_of[a] is not group_of[b]
        }
        self.report.kernel_of = {name: group.op.name for name, group in group_of.items()}
        return self.report

    def round(self) -> bool:
        """Try every candidate once, the best first; whether anything was fused."""
        pairs = sorted(self.candidates(), key=lambda pair: (pair[0], -pair[1], -pair[2]), reverse=True)
        if self.shuffle is not None:
            self.shuffle.shuffle(pairs)
        moved: dict[int, int] = {}  # group merged in this round -> group that replaced it

        def now(number: int) -> int:
            while number in moved:
                number = moved[number]
            return number

        for _, a, b in pairs:
            first, second = self.groups.in_order(now(a), now(b))
            if first == second or self._attempt(first, second) in self.settled:
                continue
            if self.try_merge(first, second):
                moved[max(first, second)] = min(first, second)
        return bool(moved)

    def candidates(self) -> Iterable[tuple[Score, int, int]]:
        """Yield (score, first, second) of pairs of kernels that share a buffer."""
        groups = self.groups
        saved: defaultdict[tuple[int, int], int] = defaultdict(int)
        position = groups.order.position
        for name, readers in groups.readers.items():
            size = groups.bytes_of(name)
            kernels = sorted((n for n in readers if isinstance(groups[n].op, Loops)), key=position.__getitem__)
            writer = groups.writer.get(name)
            if writer is not None and isinstance(groups[writer].op, Loops):
                for reader in kernels:
                    saved[groups.in_order(writer, reader)] += size
            for at, first in enumerate(kernels):
                for second in kernels[at + 1 : at + 1 + NEIGHBOURS]:
                    if position[second] - position[first] <= FARTHEST:
                        saved[first, second] += size
        for (first, second), size in saved.items():
            if self._attempt(first, second) not in self.settled and self._may_align(first, second):
                bodies = (groups[first].kernel.body, groups[second].kernel.body)
                yield score(*bodies, size, abs(position[first] - position[second])), first, second

    def _may_align(self, first: int, second: int) -> bool:
        a, b = self.groups[first].kernel.body, self.groups[second].kernel.body
        return same_space(a, b) or (self.changes.across and crosses(a, b))

    def _attempt(self, first: int, second: int) -> tuple[int, int, int, int, int]:
        """Return the key of an attempt to merge two groups in their current state with this round's loop changes."""
        a, b = self.groups[first], self.groups[second]
        across = self.changes.across and crosses(a.kernel.body, b.kernel.body)
        reorders = self.changes.reorders and not (a.kernel.body.reduction and b.kernel.body.reduction)
        return first, second, a.grown, b.grown, across + reorders

    def try_merge(self, first: int, second: int) -> bool:
        """Fuse two groups, of which `first` is the earlier one, or record the refusal; whether they were fused."""
        a, b = self.groups[first], self.groups[second]
        refusal = self._merged(a, b)
        if refusal is not None:
            self.settled.add(self._attempt(first, second))
            self.report.refused[a.op.name, b.op.name] = refusal
        return refusal is None

    def _merged(self, a: Group, b: Group) -> Refusal | None:
        """Replace two kernels by one, or return the refusal."""
        local = self.groups.local(a, b)
        kernel = verdict(self.groups, a, b, local, self.changes, self.refuse)
        if isinstance(kernel, Refusal):
            return kernel
        slower = None if self.measure is None else _slower(a, b, kernel, self.measure)
        if slower is not None:
            return slower
        place = self.groups.make_room(a, b)
        shared = (a.reads & b.reads) | (a.writes & b.reads) | local
        self.report.fused.append((a.op.name, b.op.name, sum(map(self.groups.bytes_of, shared))))
        self.groups.replace(a, b, kernel, local, place)
        return None


@once_for_all_buffers
def _final(body: Body) -> Body | None:
    return rounded_once(numbers_last(simplified(body)))


def _slower(a: Group, b: Group, fused: Loops, measure: Measure) -> Refusal | None:
    """Return why a measured fusion is refused, or None."""
    both = measure(fused)
    alone = [measure(group.kernel) for group in (a, b)]
    if isinstance(both, str):
        return Refusal(f"it could not be measured: {both}")
    if both.spills:
        return Refusal(f"measured: fused it spills {both.spills} registers")
    apart_ns = sum(timing.ns for timing in alone if isinstance(timing, KernelTiming))
    if both.ns < apart_ns or not all(isinstance(timing, KernelTiming) for timing in alone):
        return None
    return Refusal(f"measured: {both.ns / 1e3:.1f} us fused, {apart_ns / 1e3:.1f} us apart")
