"""Tracks the live memory while each op runs, so that fusion does not raise the peak.

A fused kernel usually runs at the position of its later part. Buffers that only the earlier part reads live longer,
which matters only at the peak; buffers local to the kernel are not allocated. A result written over an argument that
dies there (codegen/program_builder.py) needs no memory of its own.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from overlapc.fusion.deps import output_buffers, reads_of
from overlapc.ir.hazards import overwrites_in_place
from overlapc.ir.ops import Combo, IROp, Loops, LoweredGraph, buffers_read, buffers_written, loops_of

# Exceeding the peak by this much is allowed: an allocator serves small buffers from segments of 2 MiB.
SLACK_BYTES = 2**20


Beside = Callable[[Sequence[IROp], Sequence[int]], Sequence[int]]
"""Returns, for ops and the live bytes at each of them, the bytes that other ops keep live there."""


def nothing_beside(ops: Sequence[IROp], live_bytes: Sequence[int]) -> Sequence[int]:
    """Return zeros: no other memory is live (a `Beside`)."""
    return [0] * len(ops)


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the live bytes while the ops from `start` to before `end` run."""

    start: int
    end: int
    bytes: int


class LiveBytes:
    """Live bytes at each op, by its number in the order before fusion."""

    def __init__(
        self,
        ops: Sequence[IROp],
        graph: LoweredGraph,
        bytes_of: Callable[[str], int],
        freeable: Collection[str],
        beside: Beside = nothing_beside,
    ) -> None:
        """freeable: inputs whose memory is freed after their last reader. beside: memory that other ops use."""
        self.graph = graph
        self.bytes_of = bytes_of
        self.last: dict[str, int] = {}  # root that is freed inside of the graph -> number of its last user
        first: dict[str, int] = dict.fromkeys(freeable, 0)
        self.first = first
        for number, op in enumerate(ops):
            for name in buffers_written(op):
                first.setdefault(graph.root(name), number)
            for name in (*reads_of(op, graph), *buffers_written(op)):
                self.last[graph.root(name)] = number
        kept = {graph.root(name) for name in output_buffers(graph)}
        change = [0] * (len(ops) + 1)
        for root, number in first.items():
            change[number] += bytes_of(root)
            if root not in kept and root in self.last:
                change[self.last[root] + 1] -= bytes_of(root)
        self.last = {root: number for root, number in self.last.items() if root in first and root not in kept}
        self.in_place = [self._in_place(op, number) for number, op in enumerate(ops)]  # bytes written over arguments
        self.live: list[int] = []
        total = 0
        for step, in_place in zip(change, self.in_place, strict=False):
            total += step
            self.live.append(total - in_place)
        self.live = [own + more for own, more in zip(self.live, beside(ops, self.live), strict=True)]
        self.peak = max(self.live, default=0)

    def _in_place(self, op: IROp, at: int, local: AbstractSet[str] = frozenset()) -> int:
        """Return the bytes that `op`, running at `at`, may write over arguments that die there."""
        if not isinstance(op, Loops | Combo):
            return 0
        parts = loops_of(op)
        reads = [{self.graph.root(name) for name in buffers_read(part)} - local for part in parts]
        readers = Counter(root for roots in reads for root in roots)
        dying = {root for root, count in readers.items() if count == 1 and self.last.get(root) == at}
        total = 0
        for part, roots in zip(parts, reads, strict=True):
            for view in part.outputs:
                taken = next((root for root in sorted(dying & roots) if self._may_take(part, root, view.buffer)), None)
                if taken is not None and view.buffer not in local:
                    dying.discard(taken)
                    total += self.bytes_of(taken)
        return total

    def _may_take(self, op: Loops, root: str, written: str) -> bool:
        if self.bytes_of(root) != self.bytes_of(written):
            return False
        read = {load.buffer for load in op.body.loads() if self.graph.root(load.buffer) == root}
        stores = [store for store in op.body.stores if store.buffer == written]
        return bool(read) and len(stores) == 1 and overwrites_in_place(op.body, stores[0], read)

    def moved(
        self, reads: Collection[str], writes: Collection[str], at: int, to: int, local: AbstractSet[str]
    ) -> list[Change]:
        """Return the changes if an op moves from `at` to `to` and `local` buffers are no longer allocated."""
        changes = [
            Change(self.first[name], self.last[name] + 1, -self.bytes_of(name)) for name in local & self.last.keys()
        ]
        made = [name for name in writes if name not in local and name in self.first]  # others need no new memory
        if to < at:
            return [*changes, *(Change(to, at, self.bytes_of(name)) for name in made)]
        roots = {self.graph.root(name) for name in reads} - local
        lives = {root: self.last[root] for root in roots if at <= self.last.get(root, to) < to}
        changes += [Change(last + 1, to + 1, self.bytes_of(root)) for root, last in lives.items()]
        return [*changes, *(Change(at, to, -self.bytes_of(name)) for name in made)]

    def rewritten(self, op: IROp, at: int, to: int, local: AbstractSet[str]) -> list[Change]:
        """Return the changes due to memory overwritten in place if `op` replaces the ops at `at` and at `to`."""
        return [
            Change(at, at + 1, self.in_place[at]),
            Change(to, to + 1, self.in_place[to] - self._in_place(op, to, local)),
        ]

    def fits(self, changes: Sequence[Change]) -> bool:
        """Whether these changes raise the peak by at most `SLACK_BYTES`."""
        borders = sorted({border for change in changes for border in (change.start, change.end)})
        for start, end in itertools.pairwise(borders):
            here = [change.bytes for change in changes if change.start <= start < change.end]
            more = sum(here)
            if more > 0 and max(self.live[start:end], default=0) + more > self.peak + SLACK_BYTES:
                return False
        return True

    def move(
        self, reads: Collection[str], writes: Collection[str], at: int, to: int, local: AbstractSet[str], op: IROp
    ) -> None:
        """Record that the op at `at` moved to `to`, where `op` replaces both."""
        changes = self.moved(reads, writes, at, to, local) + self.rewritten(op, at, to, local)
        self.in_place[at], self.in_place[to] = 0, self._in_place(op, to, local)
        for change in changes:
            for number in range(change.start, min(change.end, len(self.live))):
                self.live[number] += change.bytes
        for root in {self.graph.root(name) for name in reads} & self.last.keys():
            self.last[root] = max(self.last[root], to)
        for name in writes:
            if name in self.first:
                self.first[name] = to
