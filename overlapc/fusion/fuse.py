"""Fusion: kernels that share memory traffic become one kernel.

Rounds over candidate pairs, best first, until a round fuses nothing. Candidates come from shared buffers: a reader
and its producer (vertical) or two readers of one buffer (horizontal). What may merge is decided in one place,
`Fuser.verdict`, and every refusal carries its reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from overlapc.fusion.deps import edges, output_buffers
from overlapc.fusion.merge import Refusal, merge, same_space, without_stores
from overlapc.fusion.order import MergingOrder
from overlapc.ir.body import Body
from overlapc.ir.ops import IROp, Loops, LoweredGraph, Start, Wait, buffers_read, buffers_written

LARGEST_KERNEL = 512  # values in one kernel: longer ones spill registers and take long to compile
MOST_BUFFERS = 48  # arguments of one kernel
NEIGHBOURS = 16  # readers of one buffer that are paired with each other: keeps candidates linear in the graph
FARTHEST = 512  # positions apart that two readers may stand: fusing farther ones lengthens live ranges


@dataclass(slots=True)
class Group:
    """Kernels fused so far; a group of any other op never merges."""

    number: int
    op: IROp
    members: list[str]
    reads: set[str]
    writes: set[str]
    waits: int  # bit set of the waits it comes after
    starts: int  # bit set of the starts that come after it


@dataclass(slots=True)
class FusionReport:
    """What was fused and what was refused, by op names."""

    fused: list[tuple[str, str, int]] = field(default_factory=list)  # first, second, bytes saved
    refused: dict[tuple[str, str], str] = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [f"fused {a} + {b}: saves {saved} bytes" for a, b, saved in self.fused]
        lines += [f"apart {a} | {b}: {reason}" for (a, b), reason in self.refused.items()]
        return "\n".join(lines)


def fuse(ops: list[IROp], graph: LoweredGraph) -> tuple[list[IROp], FusionReport]:
    """`ops` with kernels fused, in a legal order, and the account of it."""
    fuser = Fuser(ops, graph)
    while fuser.round():
        pass
    return fuser.result(), fuser.report


class Fuser:
    """State of one fusion run."""

    def __init__(self, ops: list[IROp], graph: LoweredGraph) -> None:
        self.graph = graph
        self.report = FusionReport()
        dependences = edges(ops, graph)
        self.order = MergingOrder(dependences.before)
        self.outputs = output_buffers(graph) | set(graph.aliases.values())
        self.groups: dict[int, Group] = {}
        self.readers: defaultdict[str, set[int]] = defaultdict(set)
        self.writer: dict[str, int] = {}
        for number, op in enumerate(ops):
            group = Group(number, op, [op.name], buffers_read(op), set(buffers_written(op)), 0, 0)
            self.groups[number] = group
            for name in group.reads:
                self.readers[name].add(number)
            for name in group.writes:
                self.writer[name] = number
        self._mark_communication(ops, dependences.before)

    def _mark_communication(self, ops: list[IROp], before: list[set[int]]) -> None:
        """For each group: the waits it depends on and the starts that depend on it, as bit sets."""
        for number, op in enumerate(ops):
            for earlier in before[number]:
                self.groups[number].waits |= self.groups[earlier].waits
            if isinstance(op, Wait):
                self.groups[number].waits |= 1 << number
        for number in range(len(ops) - 1, -1, -1):
            if isinstance(ops[number], Start):
                self.groups[number].starts |= 1 << number
            for earlier in before[number]:
                self.groups[earlier].starts |= self.groups[number].starts

    # --- one round

    def round(self) -> bool:
        """Tries every candidate once, most bytes saved first; whether anything fused."""
        pairs = sorted(self.candidates(), key=lambda pair: (-pair[0], pair[1]))
        fused = False
        moved: dict[int, int] = {}  # merged away in this round -> where to

        def now(number: int) -> int:
            while number in moved:
                number = moved[number]
            return number

        for _, (_, a, b) in pairs:
            first, second = now(a), now(b)
            if first == second:
                continue
            if self.order.position[first] > self.order.position[second]:
                first, second = second, first
            kept = self.try_merge(first, second)
            if kept is not None:
                moved[first if kept == second else second] = kept
                fused = True
        return fused

    def candidates(self) -> Iterable[tuple[int, tuple[int, int, int]]]:
        """(bytes saved, (distance, first, second)) of pairs of kernels that share a buffer."""
        saved: defaultdict[tuple[int, int], int] = defaultdict(int)
        position = self.order.position
        for name, readers in self.readers.items():
            if not readers:
                continue
            size = self.bytes_of(name)
            kernels = sorted((n for n in readers if isinstance(self.groups[n].op, Loops)), key=position.__getitem__)
            writer = self.writer.get(name)
            if writer is not None and isinstance(self.groups[writer].op, Loops):
                for reader in kernels:
                    if reader != writer:
                        saved[self._pair(writer, reader)] += size
            for at, first in enumerate(kernels):
                for second in kernels[at + 1 : at + 1 + NEIGHBOURS]:
                    if position[second] - position[first] <= FARTHEST:
                        saved[self._pair(first, second)] += size
        for (first, second), size in saved.items():
            if same_space(self._body(first), self._body(second)):
                yield size, (abs(position[first] - position[second]), first, second)

    def _pair(self, a: int, b: int) -> tuple[int, int]:
        return (a, b) if self.order.position[a] < self.order.position[b] else (b, a)

    def _body(self, number: int) -> Body:
        op = self.groups[number].op
        assert isinstance(op, Loops)
        return op.body

    def bytes_of(self, name: str) -> int:
        view = self.graph.views.get(name)
        return self.graph.hint(view.layout.storage_bytes()) if view is not None else 0

    # --- one pair

    def try_merge(self, first: int, second: int) -> int | None:
        a, b = self.groups[first], self.groups[second]
        assert isinstance(a.op, Loops)
        assert isinstance(b.op, Loops)
        merged = self.verdict(a, b)
        if isinstance(merged, Refusal):
            self.report.refused[a.op.name, b.op.name] = merged.reason
            return None
        kept = self.order.merge(first, second)
        if kept is None:
            self.report.refused[a.op.name, b.op.name] = "another op must run between them"
            return None
        self._replace(kept, a, b, merged)
        return kept

    def verdict(self, a: Group, b: Group) -> Body | Refusal:
        """The merged body, or why the two kernels stay apart."""
        assert isinstance(a.op, Loops)
        assert isinstance(b.op, Loops)
        if a.op.device != b.op.device:
            return Refusal("they run on different devices")
        if len(a.reads | b.reads | a.writes | b.writes) > MOST_BUFFERS:
            return Refusal(f"together they use more than {MOST_BUFFERS} buffers")
        # A kernel that a start waits for would have to wait for a communication that it did not need, or a start
        # be launched later: it would undo overlap that the passes could have had.
        if (a.starts & ~b.starts and b.waits & ~a.waits) or (b.starts & ~a.starts and a.waits & ~b.waits):
            return Refusal("one leads to a collective's start, the other comes after a wait")
        merged = merge(a.op.body, b.op.body)
        if not isinstance(merged, Refusal) and len(merged.values()) > LARGEST_KERNEL:
            return Refusal(f"together they compute more than {LARGEST_KERNEL} values")
        return merged

    def _replace(self, kept: int, a: Group, b: Group, body: Body) -> None:
        assert isinstance(a.op, Loops)
        assert isinstance(b.op, Loops)
        gone = b.number if kept == a.number else a.number
        for name in self.groups[gone].reads:
            self.readers[name].discard(gone)
        for name in a.reads | b.reads:
            self.readers[name].discard(kept)
        writes = a.writes | b.writes
        for name in writes:
            self.writer[name] = kept
        # Buffers that live and die inside the kernel never touch memory.
        local = {name for name in writes if not self.readers[name] and name not in self.outputs}
        for name in local:
            del self.readers[name], self.writer[name]
        body = without_stores(body, local)
        outputs = tuple(view for view in a.op.outputs + b.op.outputs if view.buffer not in local)
        op = Loops(b.op.name, a.op.device, body, outputs, a.op.origin.joined(b.op.origin))
        reads = {load.buffer for load in body.loads()}
        saved = sum(self.bytes_of(name) for name in (a.reads & b.reads) | (a.writes & b.reads) | local)
        self.report.fused.append((a.op.name, b.op.name, saved))
        del self.groups[gone]
        self.groups[kept] = Group(
            kept, op, a.members + b.members, reads, writes - local, a.waits | b.waits, a.starts | b.starts
        )
        for name in reads:
            self.readers[name].add(kept)

    def result(self) -> list[IROp]:
        return [self.groups[number].op for number in self.order.order()]
