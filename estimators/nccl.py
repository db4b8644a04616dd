"""Estimates of collectives from measured tables, or as latency + bytes / bandwidth of a ring or a tree.

`Comm.bytes` follows each collective's own definition (schedule/model.py): an all-gather counts its gathered result, an
all-reduce counts its tensor once. The links that a group crosses follow from its ranks; unknown ranks are assumed to be
contiguous.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from overlapc.estimators.device import DeviceProfile, Link, Table
from overlapc.estimators.links import crossed, ranks_by_host
from overlapc.schedule.collective_kinds import COPY
from overlapc.schedule.model import Comm, Estimate, Node


@dataclass(frozen=True)
class MeasuredCollectives:
    """Estimates collectives of groups within one host from the profile's tables."""

    profile: DeviceProfile

    @property
    def name(self) -> str:
        return f"table {self.profile.name}"

    def estimate(self, node: Node) -> Estimate | None:
        comm = node.comm
        if comm is None or ranks_by_host(comm, self.profile) != {0: comm.size}:
            return None
        table = self.profile.table(comm.carried, comm.size, comm.dtype)
        if table is None or not table.points:
            return None
        alone = self.profile.slowdown(comm.carried, comm.channels).alone
        return Estimate(interpolate(table, comm.bytes) * alone, self.name)


@dataclass(frozen=True)
class AnalyticCollectives:
    """Estimates collectives as rings or trees over the slowest link that the group crosses."""

    profile: DeviceProfile

    @property
    def name(self) -> str:
        return f"analytic {self.profile.name}"

    def estimate(self, node: Node) -> Estimate | None:
        comm = node.comm
        if comm is None or comm.size < 1:
            return None
        if comm.size == 1:
            return Estimate(self.profile.collective_floor_ns, self.name)
        if comm.via == COPY and self.profile.copy_link is not None and len(ranks_by_host(comm, self.profile)) == 1:
            # A rank copies directly to (or from) every peer, so it moves the parts of all other ranks.
            moved_bytes = comm.bytes * (comm.size - 1) / comm.size
            return Estimate(self.profile.copy_link.ns(1, moved_bytes), self.name)
        way = crossed(comm, self.profile)
        ns = None if way is None else ring_or_tree_ns(comm, way[1])
        if ns is None:
            return None
        alone = self.profile.slowdown(comm.carried, comm.channels).alone
        return Estimate(self.profile.collective_floor_ns + ns * alone, self.name)


def interpolate(table: Table, size_bytes: int) -> float:
    """Return the ns for a size: linear between points, the first point's time below them, `last_slope` above."""
    points = table.points
    at = bisect_left(points, (size_bytes, -math.inf))
    if at == 0:
        return points[0][1]
    if at == len(points):
        most, most_ns = points[-1]
        return most_ns + last_slope(points) * (size_bytes - most)
    (low, low_ns), (high, high_ns) = points[at - 1], points[at]
    return low_ns + (high_ns - low_ns) * (size_bytes - low) / (high - low)


def last_slope(points: Sequence[tuple[int, float]]) -> float:
    """Return the ns per byte above the last point: the slope between the last two, or, with one point or noise that
    lets times decrease, the ratio of the last."""
    (less, less_ns), (most, most_ns) = (points[-2] if len(points) > 1 else (0, 0.0)), points[-1]
    return (most_ns - less_ns) / (most - less) if most_ns > less_ns else most_ns / most


def ring_or_tree_ns(comm: Comm, link: Link) -> float | None:
    """Return the time on the links alone, in ns; None for a collective whose traffic is not known."""
    ranks, size = comm.size, comm.bytes
    share = (ranks - 1) / ranks
    depth = math.ceil(math.log2(ranks))
    match comm.collective if comm.via != COPY else "all_to_all":  # copies also go to every peer directly
        case "all_gather" | "reduce_scatter":
            return link.ns(ranks - 1, share * size)
        case "all_to_all":  # every peer directly
            return link.ns(1, share * size)
        case "all_reduce":  # the tree goes up and down: no 1/ranks saved, far fewer steps
            return min(link.ns(2 * (ranks - 1), 2 * share * size), link.ns(2 * depth, 2 * size))
        case "broadcast":
            return link.ns(depth, size)
        case "point_to_point":
            return link.ns(1, size)
    return None
