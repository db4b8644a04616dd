"""Fusion: kernels that share memory traffic become one kernel.

Rounds over candidate pairs, best first, until a round fuses nothing. Candidates come from shared buffers: a reader
and its producer (vertical) or two readers of one buffer (horizontal). What may merge is decided in `legality`, and
every refusal carries its reason.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from overlapc.fusion.combo import combine
from overlapc.fusion.cuts import cut
from overlapc.fusion.kernel_groups import Group, Groups
from overlapc.fusion.legality import LoopChanges, one_kernel, verdict
from overlapc.fusion.merge import Refusal, same_space
from overlapc.fusion.mixed_order import crosses
from overlapc.fusion.report import FusionReport
from overlapc.fusion.score import Score, score
from overlapc.fusion.simplify import simplified
from overlapc.ir.conversions import numbers_last, rounded_once
from overlapc.ir.ops import IROp, Loops, LoweredGraph, Refuse, nothing_refused

NEIGHBOURS = 8  # readers of one buffer that are paired with each other: keeps candidates linear in the graph
FARTHEST = 512  # positions apart that two readers may stand: fusing farther ones lengthens live ranges
# With loops as they are, then crosswise too, then in any order.
ROUNDS = (LoopChanges(), LoopChanges(across=True), LoopChanges(across=True, reorders=True))


@dataclass(frozen=True, slots=True)
class KernelTiming:
    """The measured time and register spills of a kernel."""

    ns: float
    spills: int = 0  # registers that did not fit, of a GPU's kernel


Measure = Callable[[Loops], KernelTiming | str]  # a kernel's timing, or why there is none


def fuse(
    ops: Sequence[IROp],
    graph: LoweredGraph,
    freeable: Collection[str] = (),
    seed: int | None = None,
    combos: bool = False,
    measure: Measure | None = None,
    refuse: Refuse = nothing_refused,
) -> tuple[list[IROp], FusionReport]:
    """`ops` with kernels fused, in a legal order, and a report of fusions and refusals.

    `freeable` names inputs that only the graph holds. With `combos`, kernels of one kind then share launches.
    With `measure`, a fusion stays only if its kernel is faster than the two alone, and spills no registers. None makes
    a kernel that `refuse` has a reason against. A `seed` tries candidates in random order: every order must give the
    same results, which tests show.
    """
    fuser = Fuser(ops, graph, freeable, None if seed is None else random.Random(seed), measure, refuse)
    fuser.run()
    if combos:
        fuser.simplify()  # before: kernels of one kind must stay so
        combine(fuser.groups, fuser.report)
    return fuser.groups.ops(), fuser.finished()


class Fuser:
    """One fusion run."""

    def __init__(
        self,
        ops: Sequence[IROp],
        graph: LoweredGraph,
        freeable: Collection[str] = (),
        shuffle: random.Random | None = None,
        measure: Measure | None = None,
        refuse: Refuse = nothing_refused,
    ) -> None:
        self.groups = Groups(ops, graph, freeable)
        self.measure = measure
        self.refuse = refuse
        self.shuffle = shuffle
        self.report = FusionReport()
        self.changes = ROUNDS[0]  # of the round that is on
        self.settled: set[tuple[int, int, int, int, int]] = set()  # refused attempts, by `_attempt`

    def run(self) -> None:
        """Runs rounds until no kernels fuse, for each entry of `ROUNDS`, then again with cut loops."""
        self._rounds()
        if self._cut():
            self._rounds()

    def _rounds(self) -> None:
        for self.changes in ROUNDS:
            while self.round():
                pass

    def _cut(self) -> bool:
        """Cuts the loops of every kernel where that can be generated; whether there was one."""
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
        """Simplifies the body of every kernel, now that no other kernel will be fused into it."""
        for group in self.groups:
            if isinstance(group.op, Loops):
                body = rounded_once(numbers_last(simplified(group.op.body)))
                group.op = dataclasses.replace(group.op, body=body)

    def finished(self) -> FusionReport:
        """The report of all rounds, without refusals of kernels that were fused later in another way."""
        group_of = {name: group for group in self.groups for name in group.members}
        self.report.refused = {
            (a, b): reason for (a, b), reason in self.report.refused.items() if group_of[a] is not group_of[b]
        }
        self.report.kernel_of = {name: group.op.name for name, group in group_of.items()}
        return self.report

    def round(self) -> bool:
        """Tries every candidate once, the best first; whether anything fused."""
        pairs = sorted(self.candidates(), key=lambda pair: (pair[0], -pair[1], -pair[2]), reverse=True)
        if self.shuffle is not None:
            self.shuffle.shuffle(pairs)
        moved: dict[int, int] = {}  # merged away in this round -> where to

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
        """(score, first, second) of pairs of kernels that share a buffer."""
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
        """A key for an attempt to merge the two groups in their current state in this round."""
        a, b = self.groups[first], self.groups[second]
        across = self.changes.across and crosses(a.kernel.body, b.kernel.body)
        reorders = self.changes.reorders and not (a.kernel.body.reduction and b.kernel.body.reduction)
        return first, second, a.grown, b.grown, across + reorders

    def try_merge(self, first: int, second: int) -> bool:
        """Fuses two groups, of which `first` is the earlier one, or records the refusal."""
        a, b = self.groups[first], self.groups[second]
        refusal = self._merged(a, b)
        if refusal is not None:
            self.settled.add(self._attempt(first, second))
            self.report.refused[a.op.name, b.op.name] = refusal.reason
        return refusal is None

    def _merged(self, a: Group, b: Group) -> Refusal | None:
        """Replaces two kernels by one, or returns the refusal."""
        body = verdict(self.groups, a, b, self.changes, self.refuse)
        if isinstance(body, Refusal):
            return body
        local = self.groups.local(a, b)
        slower = None if self.measure is None else _slower(a, b, one_kernel(a, b, body, local), self.measure)
        if slower is not None:
            return slower
        place = self.groups.make_room(a, b)
        if isinstance(place, Refusal):
            return place
        shared = (a.reads & b.reads) | (a.writes & b.reads) | local
        self.report.fused.append((a.op.name, b.op.name, sum(map(self.groups.bytes_of, shared))))
        self.groups.replace(a, b, one_kernel(a, b, body, local), local, place)
        return None


def _slower(a: Group, b: Group, fused: Loops, measure: Measure) -> Refusal | None:
    """The reason why a measured fusion is refused, or None."""
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
