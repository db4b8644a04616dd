"""The estimated time of a bucket of collectives: one launch over all their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from overlapc.passes.base import Context
from overlapc.passes.merging import merged_node
from overlapc.schedule.model import Comm, Estimate, Node


class BucketCost:
    """Estimates of buckets of collectives of one kind."""

    def __init__(self, ctx: Context, one: Node) -> None:
        self._ctx = ctx
        self.latency_ns = self._latency_ns(one)

    def estimate(self, members: Sequence[Node]) -> Estimate | None:
        """Return the estimator's answer, else the members' sum minus saved latencies; None if a member is unknown."""
        known = [member.estimate for member in members if member.estimate is not None]
        if len(known) < len(members):
            return None
        if len(members) == 1:
            return known[0]
        apart_ns = sum(estimate.ns for estimate in known)
        answer = self._asked(members[0], sum(comm_of(member).bytes for member in members))
        if answer is not None:
            each_ns = (len(members) - 1) * self._ctx.profile.coalesced_tensor_ns
            return Estimate(min(answer.ns + each_ns, apart_ns), answer.source)
        saved_ns = (len(members) - 1) * self.latency_ns
        return Estimate(max(*(estimate.ns for estimate in known), apart_ns - saved_ns), known[0].source)

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
    comm, node = comm_of(members[0]), merged_node(members, payload)
    dtypes = {comm_of(member).dtype for member in members}
    size_bytes = sum(comm_of(member).bytes for member in members)
    return replace(
        node,
        comm=replace(
            comm, bytes=size_bytes, dtype=comm.dtype if len(dtypes) == 1 else "mixed", param="", param_number=-1
        ),
        estimate=cost.estimate(members),
        origin=replace(node.origin, module=comm.unit),
    )


def ns_of(node: Node) -> float:
    """Return the estimate of a node in ns; 0 for a node without an estimate."""
    return 0.0 if node.estimate is None else node.estimate.ns


def comm_of(node: Node) -> Comm:
    """Return the `Comm` of a collective, which must have one."""
    assert node.comm is not None
    return node.comm
