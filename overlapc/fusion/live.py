"""How much memory is live while each op runs, so that fusion does not raise the peak.

A fused kernel runs where its later part ran. What only the earlier part reads then lives longer, which is harmless
where memory is not scarce; what becomes local to the kernel does not live at all.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from overlapc.fusion.deps import output_buffers, reads_of
from overlapc.ir.ops import IROp, LoweredGraph, buffers_written

# More than the peak by this is no more: an allocator hands out small buffers from segments of 2 MiB.
SLACK_BYTES = 2**20


class LiveBytes:
    """Bytes live at each op, by its number in the order that fusion starts from."""

    def __init__(
        self, ops: Sequence[IROp], graph: LoweredGraph, bytes_of: Callable[[str], int], freeable: Collection[str]
    ) -> None:
        """`freeable` names the inputs whose memory ends with their last reader."""
        self.graph = graph
        self.bytes_of = bytes_of
        self.last: dict[str, int] = {}  # memory that ends inside the graph -> number of its last user
        first: dict[str, int] = dict.fromkeys(freeable, 0)
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
        self.live: list[int] = []
        total = 0
        for step in change[: len(ops)]:
            total += step
            self.live.append(total)
        self.peak = max(self.live, default=0)

    def held(self, reads: Collection[str], start: int, end: int, local: Collection[str]) -> int:
        """Bytes more that live from after op `start` to op `end` when `start` runs at `end` instead."""
        roots = {self.graph.root(name) for name in reads}
        longer = sum(self.bytes_of(root) for root in roots if start <= self.last.get(root, end) < end)
        return longer - sum(self.bytes_of(name) for name in local)

    def advanced(self, writes: Collection[str], local: Collection[str]) -> int:
        """Bytes more that live from where an op runs that writes `writes`, when it runs earlier than it did."""
        made = (
            name for name in writes if name not in local and self.graph.root(name) == name
        )  # others: memory there is
        return sum(map(self.bytes_of, made)) - sum(map(self.bytes_of, local))

    def advance(self, start: int, end: int, more: int) -> None:
        """What ran at op `end` now runs at `start`."""
        for number in range(start, end):
            self.live[number] += more

    def fits(self, start: int, end: int, more: int) -> bool:
        """Whether `more` bytes while the ops between the two run leave the peak as it is, but for `SLACK_BYTES`."""
        return more <= 0 or max(self.live[start + 1 : end], default=0) + more <= self.peak + SLACK_BYTES

    def delay(self, reads: Collection[str], start: int, end: int, more: int) -> None:
        """Op `start` now runs at `end`."""
        for number in range(start + 1, end + 1):
            self.live[number] += more
        for name in reads:
            root = self.graph.root(name)
            if root in self.last:
                self.last[root] = max(self.last[root], end)
