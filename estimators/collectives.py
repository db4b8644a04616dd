"""Collectives: measured tables first, else latency + bytes over bandwidth of a ring or a tree.

`Comm.bytes` follows each collective's own definition (schedule/model.py), so a gather is priced by what it
gathers and an all-reduce by its tensor once. Which links a group crosses comes from its ranks when they are
known; a group of unknown ranks is taken to be contiguous.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass

from overlapc.estimators.device import DeviceProfile, Link, Table
from overlapc.schedule.model import Comm, Estimate, Node


@dataclass(frozen=True)
class MeasuredCollectives:
    """Groups within one host, of a size that the profile has a table for."""

    profile: DeviceProfile

    @property
    def name(self) -> str:
        return f"table {self.profile.name}"

    def estimate(self, node: Node) -> Estimate | None:
        comm = node.comm
        if comm is None or _ranks_by_host(comm, self.profile) != {0: comm.size}:
            return None
        table = self.profile.table(comm.collective, comm.size, comm.dtype)
        if table is None or not table.points:
            return None
        return Estimate(interpolate(table, comm.bytes), self.name)


@dataclass(frozen=True)
class AnalyticCollectives:
    """Rings and trees over the slowest link that the group crosses."""

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
        link = self._link(comm)
        ns = None if link is None else _ring_or_tree_ns(comm, link)
        return None if ns is None else Estimate(self.profile.collective_floor_ns + ns, self.name)

    def _link(self, comm: Comm) -> Link | None:
        """The narrowest link of a ring: within a host, or out of it through every member's network card."""
        profile = self.profile
        hosts = _ranks_by_host(comm, profile)
        if len(hosts) == 1:
            return profile.host_link
        network = profile.network_link
        if network is None:
            return None
        cards = min(hosts.values())  # each local rank of the group brings its own card
        if cards == 1 or profile.host_link is None:
            return network
        return Link(min(network.bytes_per_s * cards, profile.host_link.bytes_per_s), network.step_ns)


def interpolate(table: Table, size_bytes: int) -> float:
    """ns for a size: linear between points, the first point's time below them, the last slope above."""
    points = table.points
    at = bisect_left(points, (size_bytes, -math.inf))
    if at == 0:
        return points[0][1]
    if at == len(points):
        if at == 1:
            return points[0][1] * size_bytes / points[0][0]
        at -= 1
    (low, low_ns), (high, high_ns) = points[at - 1], points[at]
    return low_ns + (high_ns - low_ns) * (size_bytes - low) / (high - low)


def _ranks_by_host(comm: Comm, profile: DeviceProfile) -> dict[int, int]:
    """Host -> how many of the group's ranks it has; hosts are counted from the group's first."""
    if not comm.ranks:
        full, rest = divmod(comm.size, profile.ranks_per_host)
        hosts = dict.fromkeys(range(full), profile.ranks_per_host)
        return {**hosts, full: rest} if rest else hosts
    counted = Counter(rank // profile.ranks_per_host for rank in comm.ranks)
    return {host: counted[key] for host, key in enumerate(sorted(counted))}


def _ring_or_tree_ns(comm: Comm, link: Link) -> float | None:
    """Time on the links alone; None for a collective whose traffic we do not know."""
    ranks, full_ns = comm.size, comm.bytes / link.bytes_per_s * 1e9
    share = (ranks - 1) / ranks
    if comm.collective in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) * link.step_ns + share * full_ns
    depth = math.ceil(math.log2(ranks))
    if comm.collective == "all_reduce":
        ring = 2 * (ranks - 1) * link.step_ns + 2 * share * full_ns
        tree = 2 * depth * link.step_ns + 2 * full_ns  # up and down: no 1/ranks saved, far fewer steps
        return min(ring, tree)
    if comm.collective == "broadcast":
        return depth * link.step_ns + full_ns
    return None
