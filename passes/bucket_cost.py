"""The estimated time of a bucket of collectives: one launch over all their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from overlapc.passes.base import Context
from overlapc.passes.merging import merged_node
from overlapc.schedule.model import Comm, Estimate, Node


@dataclass(slots=True)
class Sum:
    """What the estimate of a bucket is computed from; members are added one by one."""

    first: Node | None = None
    count: int = 0
    bytes: int = 0
    apart_ns: float = 0.0  # all members, unmerged, one after the other
    longest_ns: float = 0.0
    known: bool = True

    @classmethod
    def of(cls, nodes: Iterable[Node]) -> Sum:
        """Return the sum over several nodes."""
        total = cls()
        for node in nodes:
            total.add(node)
        return total

    def add(self, node: Node) -> None:
        """Add one member."""
        self.first = self.first or node
        self.count += 1
        self.bytes += comm_of(node).bytes
        self.apart_ns += ns_of(node)
        self.longest_ns = max(self.longest_ns, ns_of(node))
        self.known &= node.estimate is not None


class BucketCost:
    """Estimates of buckets of collectives of one kind."""

    def __init__(self, ctx: Context, one: Node) -> None:
        self._ctx = ctx
        self.latency_ns = self._latency_ns(one)

    def estimate(self, total: Sum) -> Estimate | None:
        """Return the estimator's answer, else the members' sum minus saved latencies; None if a member is unknown."""
        first = total.first
        if first is None or not total.known:
            return None
        assert first.estimate is not None
        if total.count == 1:
            return first.estimate
        answer = self._asked(first, total.bytes)
        if answer is not None:
            each_ns = (total.count - 1) * self._ctx.profile.coalesced_tensor_ns
            return Estimate(min(answer.ns + each_ns, total.apart_ns), answer.source)
        saved_ns = (total.count - 1) * self.latency_ns
        return Estimate(max(total.longest_ns, total.apart_ns - saved_ns), first.estimate.source)

    def ns(self, total: Sum) -> float:
        """Return the estimate in ns, 0 if it is unknown."""
        estimate = self.estimate(total)
        return 0.0 if estimate is None else estimate.ns

    def _latency_ns(self, one: Node) -> float:
        """Return the part of a collective's time that is independent of its bytes. It grows with the group: 1,023
        steps for 1,024 ranks."""
        least = self._asked(one, comm_of(one).size)
        floor_ns = self._ctx.profile.collective_latency_ns
        return floor_ns if least is None else max(floor_ns, min(least.ns, ns_of(one) or least.ns))

    def _asked(self, like: Node, size_bytes: int) -> Estimate | None:
        if self._ctx.estimate is None:
            return None
        return self._ctx.estimate(replace(like, estimate=None, comm=replace(comm_of(like), bytes=size_bytes)))


def bucket_node(members: Sequence[Node], payload: Any, cost: BucketCost) -> Node:
    """Return one launch of all `members`; a single member is returned itself."""
    if len(members) == 1:
        return members[0]
    comm, total = comm_of(members[0]), Sum.of(members)
    dtypes = {comm_of(member).dtype for member in members}
    node = merged_node(members, payload)
    return replace(
        node,
        comm=replace(comm, bytes=total.bytes, dtype=comm.dtype if len(dtypes) == 1 else "mixed"),
        estimate=cost.estimate(total),
        origin=replace(node.origin, module=comm.unit),
    )


def ns_of(node: Node) -> float:
    """Return the estimate of a node in ns; 0 for a node without an estimate."""
    return 0.0 if node.estimate is None else node.estimate.ns


def comm_of(node: Node) -> Comm:
    """Return the `Comm` of a collective, which must have one."""
    assert node.comm is not None
    return node.comm
