"""Fusion: kernels that share memory traffic become one kernel.

Rounds over candidate pairs, best first, until a round fuses nothing. Candidates come from shared buffers: a reader
and its producer (vertical) or two readers of one buffer (horizontal). What may merge is decided in one place,
`Fuser.verdict`, and every refusal carries its reason.
"""

from __future__ import annotations

import dataclasses
import random
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

from overlapc.fusion.combo import MOST_POINTERS, combine, rough_kind
from overlapc.fusion.deps import edges, output_buffers
from overlapc.fusion.live import LiveBytes
from overlapc.fusion.loop_order import in_order_of, scattered_bytes
from overlapc.fusion.merge import Refusal, merge, same_space, without_stores
from overlapc.fusion.mixed_order import crosses, merge_across, skips
from overlapc.fusion.order import MergingOrder
from overlapc.fusion.score import Score, score
from overlapc.fusion.simplify import simplified
from overlapc.ir.body import Body, Checked, topological
from overlapc.ir.hazards import overwrites_in_place, scatters
from overlapc.ir.ops import (
    Combo,
    IROp,
    Loops,
    LoweredGraph,
    Refuse,
    Start,
    Wait,
    buffers_read,
    buffers_written,
    loops_of,
    nothing_refused,
)

LARGEST_KERNEL = 512  # values in one kernel: longer ones spill registers and take long to compile
MOST_BUFFERS = 48  # arguments of one kernel
NEIGHBOURS = 8  # readers of one buffer that are paired with each other: keeps candidates linear in the graph
LITTLE = 64  # one part of so many in what a kernel moves is not worth fusing for
FARTHEST = 512  # positions apart that two readers may stand: fusing farther ones lengthens live ranges


@dataclass(slots=True)
class Group:
    """Kernels fused or combined so far; a group of any other op never merges."""

    number: int
    op: IROp
    members: list[str]
    reads: set[str]
    writes: set[str]
    runs_at: int  # number of the op in whose place it runs
    waits: int = 0  # bit set of the waits it comes after
    starts: int = 0  # bit set of the starts that come after it

    @property
    def dots(self) -> bool:
        """Whether it holds a matrix product."""
        return isinstance(self.op, Loops) and bool(self.op.body.dots())

    @property
    def kernel(self) -> Loops:
        """The op of a group that is generated code."""
        assert isinstance(self.op, Loops), f"{self.op.name} is no generated kernel"
        return self.op


@dataclass(frozen=True, slots=True)
class Timing:
    """What running a kernel showed."""

    ns: float
    spills: int = 0  # registers that did not fit, of a GPU's kernel


Measure = Callable[[Loops], Timing | str]  # a kernel's timing, or why there is none


@dataclass(slots=True)
class FusionReport:
    """What was fused and what was refused, by op names."""

    fused: list[tuple[str, str, int]] = field(default_factory=list)  # first, second, bytes saved
    combined: list[tuple[str, str]] = field(default_factory=list)  # first, second of one launch
    refused: dict[tuple[str, str], str] = field(default_factory=dict)
    kernel_of: dict[str, str] = field(default_factory=dict)  # op -> the fused op it is part of

    def __str__(self) -> str:
        lines = [f"fused {a} + {b}: saves {saved} bytes" for a, b, saved in self.fused]
        lines += [f"one launch {a} + {b}" for a, b in self.combined]
        lines += [f"apart {a} | {b}: {reason}" for (a, b), reason in self.refused.items()]
        return "\n".join(lines)


def fuse(
    ops: Sequence[IROp],
    graph: LoweredGraph,
    freeable: Collection[str] = (),
    seed: int | None = None,
    combos: bool = False,
    measure: Measure | None = None,
    refuse: Refuse = nothing_refused,
) -> tuple[list[IROp], FusionReport]:
    """`ops` with kernels fused, in a legal order, and the account of it.

    `freeable` names inputs that nobody holds but the graph. With `combos`, kernels of one kind then share launches.
    With `measure`, a fusion stays only if its kernel is faster than the two alone, and spills no registers. None makes
    a kernel that `refuse` has a reason against. A `seed`
    tries candidates in random order: every order must give the same results, which tests show.
    """
    fuser = Fuser(ops, graph, freeable, None if seed is None else random.Random(seed), measure, refuse)
    fuser.run()
    if combos:
        fuser.simplify()  # before: kernels of one kind must stay so
        combine(fuser)
    return fuser.result(), fuser.report


class Fuser:
    """State of one fusion run."""

    def __init__(
        self,
        ops: Sequence[IROp],
        graph: LoweredGraph,
        freeable: Collection[str] = (),
        shuffle: random.Random | None = None,
        measure: Measure | None = None,
        refuse: Refuse = nothing_refused,
    ) -> None:
        self.graph = graph
        self.measure = measure
        self.refuse = refuse
        self.shuffle = shuffle
        self.report = FusionReport()
        self.sizes: dict[str, int] = {}
        dependences = edges(ops, graph)
        self.order = MergingOrder(dependences.before)
        self.outputs = output_buffers(graph) | set(graph.aliases) | set(graph.aliases.values())
        self.memory = LiveBytes(ops, graph, self.bytes_of, freeable)
        self.groups: dict[int, Group] = {}
        self.readers: defaultdict[str, set[int]] = defaultdict(set)
        self.writer: dict[str, int] = {}
        self.grown = [0] * len(ops)  # how often a group has merged
        self.across = False  # whether kernels may merge whose loops cross
        self.reorders = False  # whether loops may change their order
        self.settled: set[tuple[int, int, int, int, int]] = set()  # refused pairs, as they were then and what was tried
        for number, op in enumerate(ops):
            group = Group(number, op, [op.name], buffers_read(op), set(buffers_written(op)), number)
            self.groups[number] = group
            for name in group.reads:
                self.readers[name].add(number)
            for name in group.writes:
                self.writer[name] = number
        self._mark_communication(ops, dependences.before)

    def _mark_communication(self, ops: Sequence[IROp], before: list[set[int]]) -> None:
        """For each group: the waits it depends on and the starts that depend on it, as bit sets."""
        waits = starts = 0
        for number, op in enumerate(ops):
            for earlier in before[number]:
                self.groups[number].waits |= self.groups[earlier].waits
            if isinstance(op, Wait):
                self.groups[number].waits |= 1 << waits
                waits += 1
        for number in range(len(ops) - 1, -1, -1):
            if isinstance(ops[number], Start):
                self.groups[number].starts |= 1 << starts
                starts += 1
            for earlier in before[number]:
                self.groups[earlier].starts |= self.groups[number].starts

    # --- rounds

    def run(self) -> None:
        """Rounds until nothing fuses: with loops as they are, then crosswise too, then in any order."""
        for self.across, self.reorders in ((False, False), (True, False), (True, True)):
            while self.round():
                pass

    def simplify(self) -> None:
        """Every kernel without what its neighbours needed it to say."""
        for group in self.groups.values():
            if isinstance(group.op, Loops):
                group.op = dataclasses.replace(group.op, body=simplified(group.op.body))

    def round(self) -> bool:
        """Tries every candidate once, the best first; whether anything fused."""
        pairs = sorted(self.candidates(), key=lambda pair: (pair[0], -pair[1], -pair[2]), reverse=True)
        if self.shuffle is not None:
            self.shuffle.shuffle(pairs)
        fused = False
        moved: dict[int, int] = {}  # merged away in this round -> where to

        def now(number: int) -> int:
            while number in moved:
                number = moved[number]
            return number

        for _, a, b in pairs:
            first, second = self._pair(now(a), now(b))
            if first == second or self._attempt(first, second) in self.settled:
                continue
            if self.try_merge(first, second):
                moved[max(first, second)] = min(first, second)
                fused = True
        return fused

    def candidates(self) -> Iterable[tuple[Score, int, int]]:
        """(score, first, second) of pairs of kernels that share a buffer."""
        saved: defaultdict[tuple[int, int], int] = defaultdict(int)
        position = self.order.position
        for name, readers in self.readers.items():
            size = self.bytes_of(name)
            kernels = sorted((n for n in readers if isinstance(self.groups[n].op, Loops)), key=position.__getitem__)
            writer = self.writer.get(name)
            if writer is not None and isinstance(self.groups[writer].op, Loops):
                for reader in kernels:
                    saved[self._pair(writer, reader)] += size
            for at, first in enumerate(kernels):
                for second in kernels[at + 1 : at + 1 + NEIGHBOURS]:
                    if position[second] - position[first] <= FARTHEST:
                        saved[first, second] += size
        for (first, second), size in saved.items():
            if self._attempt(first, second) not in self.settled and self._may_align(first, second):
                bodies = (self.groups[first].kernel.body, self.groups[second].kernel.body)
                yield score(*bodies, size, abs(position[first] - position[second])), first, second

    def _pair(self, a: int, b: int) -> tuple[int, int]:
        return (a, b) if self.order.position[a] < self.order.position[b] else (b, a)

    def _may_align(self, first: int, second: int) -> bool:
        a, b = self.groups[first].kernel.body, self.groups[second].kernel.body
        return same_space(a, b) or (self.across and crosses(a, b))

    def _attempt(self, first: int, second: int) -> tuple[int, int, int, int, int]:
        """The two groups as they are, and which ways to merge them this round would try."""
        a, b = self.groups[first].kernel.body, self.groups[second].kernel.body
        ways = (self.across and crosses(a, b)) + (self.reorders and not (a.reduction or b.reduction))
        return first, second, self.grown[first], self.grown[second], ways

    def bytes_of(self, name: str) -> int:
        """Bytes of a buffer at the traced sizes; 0 for what is no tensor."""
        known = self.sizes.get(name)
        if known is None:
            view = self.graph.views.get(name)
            known = self.sizes[name] = self.graph.hint(view.layout.storage_bytes()) if view is not None else 0
        return known

    # --- one pair

    def try_merge(self, first: int, second: int) -> bool:
        """Fuses two groups, `first` standing earlier, or notes why not."""
        a, b = self.groups[first], self.groups[second]
        merged = self.verdict(a, b)
        slower = None if isinstance(merged, Refusal) else self._slower(a, b, merged)
        if slower is not None:
            merged = slower
        if not isinstance(merged, Refusal):
            place = self._stays_and_moves(a, b)
            between = self.order.merge(first, second)
            if between is None:
                local = self._local(a, b)
                saved = sum(map(self.bytes_of, (a.reads & b.reads) | (a.writes & b.reads) | local))
                self.report.fused.append((a.op.name, b.op.name, saved))
                self._replace(a, b, self._fused(a, b, merged, local), local, place)
                return True
            merged = Refusal(f"{self.groups[between].op.name} must run between them")
        self.settled.add(self._attempt(first, second))
        self.report.refused[a.op.name, b.op.name] = merged.reason
        return False

    def verdict(self, a: Group, b: Group) -> Body | Refusal:
        """The merged body, or why the two kernels stay apart."""
        if (a.dots or b.dots) and a.kernel.body.reduction and b.kernel.body.reduction:
            return Refusal("a matrix product shares its kernel with no other reduction")
        if len(a.reads | b.reads | a.writes | b.writes) > MOST_BUFFERS:
            return Refusal(f"together they use more than {MOST_BUFFERS} buffers")
        if scatters(a.kernel.body) or scatters(b.kernel.body):
            return Refusal("one of them scatters: its iterations go by where they write")
        if self._only_alike(a, b):
            return Refusal("they share next to nothing and are of one kind: one launch may run both")
        obstacle = self._obstacle(a, b, self._local(a, b))
        if obstacle is not None:
            return obstacle
        merged = merge(a.kernel.body, b.kernel.body)
        if not isinstance(merged, Refusal) and self._goes_crosswise(a, b, merged):
            merged = Refusal("they go through what they share in different orders")
        if isinstance(merged, Refusal) and self.across and crosses(a.kernel.body, b.kernel.body):
            across = merge_across(a.kernel.body, b.kernel.body, self.graph.hint, self.bytes_of)
            if isinstance(across, Refusal):
                return Refusal(f"{merged.reason}; crosswise: {across.reason}")
            merged = across
        if isinstance(merged, Refusal) and self.reorders:
            merged = self._reordered(a, b) or merged
        if isinstance(merged, Refusal):
            return merged
        if (a.dots or b.dots) and merged.stores_terms():
            return Refusal("it would need the single terms of a matrix product")
        if len(merged.values()) > LARGEST_KERNEL:
            return Refusal(f"together they compute more than {LARGEST_KERNEL} values")
        unsafe = self._unsafe_change(a, b, merged)
        if unsafe is not None:
            return unsafe
        reason = self.refuse(a.kernel.device, merged)
        return merged if reason is None else Refusal(reason)

    def _slower(self, a: Group, b: Group, merged: Body) -> Refusal | None:
        """Why measurement speaks against a fusion, if there is one and it does."""
        if self.measure is None:
            return None
        both = self.measure(self._fused(a, b, merged, self._local(a, b)))
        alone = [self.measure(group.kernel) for group in (a, b)]
        if isinstance(both, str):
            return Refusal(f"it could not be measured: {both}")
        if both.spills:
            return Refusal(f"measured: fused it spills {both.spills} registers")
        apart_ns = sum(timing.ns for timing in alone if isinstance(timing, Timing))
        if both.ns < apart_ns or not all(isinstance(timing, Timing) for timing in alone):
            return None
        return Refusal(f"measured: {both.ns / 1e3:.1f} us fused, {apart_ns / 1e3:.1f} us apart")

    def _only_alike(self, a: Group, b: Group) -> bool:
        """Whether two kernels look alike and share but a scalar: fused in pairs they would be of another kind."""
        if not a.writes.isdisjoint(b.reads) or rough_kind(a.kernel) != rough_kind(b.kernel):
            return False
        shared = sum(map(self.bytes_of, a.reads & b.reads))
        return shared * LITTLE < min(sum(map(self.bytes_of, group.reads | group.writes)) for group in (a, b))

    def _goes_crosswise(self, a: Group, b: Group, merged: Body) -> bool:
        """Whether one would go over rows and the other over columns, as sizes that happen to be equal allow."""
        if not merged.reduction:
            return False
        shared = a.reads & b.reads
        places = [
            {(load.buffer, load.index) for load in body.loads() if load.buffer in shared}
            for body in (a.kernel.body, b.kernel.body, merged)
        ]
        more = len(places[2]) > max(len(places[0]), len(places[1]))
        return more and skips(merged, a.kernel.body, b.kernel.body, self.bytes_of)

    def _unsafe_change(self, a: Group, b: Group, merged: Body) -> Refusal | None:
        """Why the merged kernel may not change memory in place, if it may not."""
        for view in (*a.kernel.mutates, *b.kernel.mutates):
            root = self.graph.root(view.buffer)
            stores = [store for store in merged.stores if self.graph.root(store.buffer) == root]
            if len(stores) > 1:
                return Refusal(f"both write to the memory of {root}")
            read = {load.buffer for load in merged.loads() if self.graph.root(load.buffer) == root}
            if not overwrites_in_place(merged, stores[0], read):
                return Refusal(f"{root} is changed in place before all iterations have read their part of it")
        return None

    def _obstacle(self, a: Group, b: Group, local: set[str]) -> Refusal | None:
        """Why one launch may not do what both do, if anything stands against it; `local` never touches memory then."""
        if a.op.device != b.op.device:  # type: ignore[union-attr]
            return Refusal("they run on different devices")
        # A kernel that a start waits for would have to wait for a communication that it did not need, or a start
        # be launched later: it would undo overlap that the passes could have had.
        if (a.starts & ~b.starts and b.waits & ~a.waits) or (b.starts & ~a.starts and a.waits & ~b.waits):
            return Refusal("one leads to a collective's start, the other comes after a wait")
        stays, moves = self._stays_and_moves(a, b)
        more = self._held(stays, moves, local)
        start, end = sorted((stays.runs_at, moves.runs_at))
        if not self.memory.fits(start, end, more):
            return Refusal(f"it would keep {more} bytes alive past the peak of memory")
        return None

    def _stays_and_moves(self, a: Group, b: Group) -> tuple[Group, Group]:
        """The group in whose place both would run, as `MergingOrder.merge` puts them, and the other."""
        first, second = self._pair(a.number, b.number)
        if self.order.may_run_early(first, second):
            return self.groups[first], self.groups[second]
        moves, stays = sorted((a, b), key=lambda group: group.runs_at)
        return stays, moves

    def _held(self, stays: Group, moves: Group, local: set[str]) -> int:
        """Bytes more that live between the places of two groups when both run where the first one does."""
        if moves.runs_at < stays.runs_at:
            return self.memory.held(moves.reads, moves.runs_at, stays.runs_at, local)
        return self.memory.advanced(moves.writes, local)

    def try_combine(self, one: int, other: int) -> bool:
        """Puts two groups of kernels of one kind into one launch, or notes why not."""
        first, second = self._pair(one, other)
        a, b = self.groups[first], self.groups[second]
        refusal = self._obstacle(a, b, set())
        if len(a.reads | b.reads | a.writes | b.writes) > MOST_POINTERS:
            refusal = Refusal(f"together they use more than {MOST_POINTERS} buffers")
        elif first in self.order.before[second]:
            refusal = Refusal("one needs the other")
        if refusal is None:
            place = self._stays_and_moves(a, b)
            between = self.order.merge(first, second)
            if between is None:
                op = Combo(b.op.name, loops_of(a.op) + loops_of(b.op), a.op.origin.joined(b.op.origin))
                self.report.combined.append((a.op.name, b.op.name))
                self._replace(a, b, op, set(), place)
                return True
            refusal = Refusal(f"{self.groups[between].op.name} must run between them")
        self.report.refused.setdefault((a.op.name, b.op.name), f"not one launch: {refusal.reason}")
        return False

    def _reordered(self, a: Group, b: Group) -> Body | None:
        """Both kernels in one, their loops in the order of the largest buffer they share; None where it costs more."""
        shared = max((a.reads | a.writes) & b.reads or b.writes & a.reads, key=lambda name: (self.bytes_of(name), name))
        first, second = (in_order_of(group.kernel.body, shared, self.graph.hint) for group in (a, b))
        if first is None or second is None:
            return None
        merged = merge(first, second)
        if isinstance(merged, Refusal):
            return None
        before = sum(scattered_bytes(group.kernel.body, self.bytes_of) for group in (a, b))
        after = scattered_bytes(without_stores(merged, self._local(a, b)), self.bytes_of)
        return merged if after - before <= self.bytes_of(shared) else None

    def _local(self, a: Group, b: Group) -> set[str]:
        """Buffers that would live and die inside the fused kernel: they never touch memory."""
        both = {a.number, b.number}
        local = {name for name in a.writes | b.writes if self.readers[name] <= both and name not in self.outputs}
        unread = {name for name in local if not self.readers[name]}
        return local - _with_checks((a.kernel.body, b.kernel.body), unread) if unread else local

    def _fused(self, a: Group, b: Group, body: Body, local: set[str]) -> Loops:
        """The kernel of `body`, which does what both groups do."""
        body = without_stores(body, local)
        outputs = tuple(view for view in a.kernel.outputs + b.kernel.outputs if view.buffer not in local)
        return Loops(
            b.op.name,
            a.kernel.device,
            body,
            outputs,
            a.kernel.mutates + b.kernel.mutates,
            a.kernel.before + b.kernel.before,
            a.op.origin.joined(b.op.origin),
        )

    def _replace(self, a: Group, b: Group, op: Loops | Combo, local: set[str], place: tuple[Group, Group]) -> None:
        """Puts `op` in the place of both groups; `order` has merged them already, `place` says where."""
        kept, gone = min(a.number, b.number), max(a.number, b.number)
        stays, moves = place
        more = self._held(stays, moves, local)
        if moves.runs_at < stays.runs_at:
            self.memory.delay(moves.reads, moves.runs_at, stays.runs_at, more)
        else:
            self.memory.advance(stays.runs_at, moves.runs_at, more)
        for name in a.reads | b.reads:
            self.readers[name] -= {kept, gone}
        for name in a.writes | b.writes:
            self.writer[name] = kept
        for name in local:
            del self.readers[name], self.writer[name]
        group = Group(
            kept,
            op,
            a.members + b.members,
            buffers_read(op),
            (a.writes | b.writes) - local,
            stays.runs_at,
        )
        for name in group.reads:
            self.readers[name].add(kept)
        del self.groups[gone]
        self.groups[kept] = group
        self.grown[kept] += 1
        self._spread(group, a, b)

    def _spread(self, group: Group, a: Group, b: Group) -> None:
        """What comes after one of the two now also comes after the other's waits; likewise starts, backwards."""
        group.waits, group.starts = a.waits | b.waits, a.starts | b.starts
        if a.waits != b.waits:
            stack = [group.number]
            while stack:
                for later in self.order.after[stack.pop()]:
                    if group.waits & ~self.groups[later].waits:
                        self.groups[later].waits |= group.waits
                        stack.append(later)
        if a.starts != b.starts:
            stack = [group.number]
            while stack:
                for earlier in self.order.before[stack.pop()]:
                    if group.starts & ~self.groups[earlier].starts:
                        self.groups[earlier].starts |= group.starts
                        stack.append(earlier)

    def result(self) -> list[IROp]:
        """All ops that are left, in a legal order."""
        group_of = {name: number for number, group in self.groups.items() for name in group.members}
        self.report.refused = {
            pair: reason for pair, reason in self.report.refused.items() if group_of[pair[0]] != group_of[pair[1]]
        }
        self.report.kernel_of = {name: self.groups[number].op.name for name, number in group_of.items()}
        return [self.groups[number].op for number in self.order.order()]


def _with_checks(bodies: Iterable[Body], unread: set[str]) -> set[str]:
    """Those of the buffers that nobody reads whose stores carry checks: without the store these would be lost."""
    return {
        store.buffer
        for body in bodies
        for store in body.stores
        if store.buffer in unread and any(isinstance(value, Checked) for value in topological(store.operands()))
    }
