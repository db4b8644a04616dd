"""What a unit's collectives cost with copies and with the process group's library.

Copies are slower than the library for little data, because ranks wait for each other's flags.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.from_profile import from_profile
from overlapc.fx.arguments import argument
from overlapc.fx.comm.collectives import Collective
from overlapc.fx.comm.exchange import EXCHANGE, travelling_bytes
from overlapc.schedule.collective_kinds import COPY
from overlapc.schedule.model import Comm, Kind
from overlapc.schedule.model import Node as ScheduleNode

REDUCTIONS = ("reduce_scatter", "all_reduce")  # collectives that an exchange and a sum can replace

Hosts = Sequence[tuple[int, ...]]  # the ranks of each host
Unit = tuple[str, str, str]


def unit_of(comm: Comm) -> Unit:
    """Return the key of the collectives that are moved together: those of one kind of a unit of `fully_shard`."""
    return comm.collective, comm.group, comm.unit


def units_faster_by_library(
    collectives: Sequence[tuple[Comm, Sequence[Comm]]], profile: DeviceProfile
) -> frozenset[Unit]:
    """Return the units that cost less with the process group's library than with copies.

    collectives: each with the collectives that would replace it with copies. A unit is moved in one launch, and costs
    the launch's time multiplied by the slowdown of large matmuls that run beside it. Empty for a profile without times
    of copies.
    """
    if profile.copy_link is None:
        return frozenset()
    units: dict[Unit, list[tuple[Comm, Sequence[Comm]]]] = {}
    for comm, by_copies in collectives:
        if by_copies:
            units.setdefault(unit_of(comm), []).append((comm, by_copies))
    cheaper = set()
    for unit, members in units.items():
        library_ns = _cost_ns([comm for comm, _ in members], profile)
        by_queue: dict[str, float] = {}  # launches on different queues overlap with those of other units
        for launch in zip(*(by_copies for _, by_copies in members), strict=True):
            queue = launch[0].queue
            by_queue[queue] = by_queue.get(queue, 0.0) + _cost_ns(launch, profile)
        if library_ns < max(by_queue.values()):
            cheaper.add(unit)
    return frozenset(cheaper)


def _cost_ns(comms: Sequence[Comm], profile: DeviceProfile) -> float:
    """Return the time of one launch of `comms` times the slowdown of matmuls beside it; infinite if it is unknown."""
    comm = replace(comms[0], bytes=sum(each.bytes for each in comms))
    estimate = from_profile(profile).estimate(ScheduleNode("", Kind.START, comm.collective, comm=comm))
    return math.inf if estimate is None else estimate.ns * profile.slowdown(comm.carried).matmul


def as_copies(collective: Collective, hosts: Hosts | None) -> Sequence[Comm]:
    """Return the collectives that would replace `collective` if copies carry as much as possible; empty if they can
    carry nothing of it."""
    if hosts is None:
        return []
    comm = collective.comm
    within, across = comm, comm
    if len(hosts) > 1:
        mine, own = next((ranks, ranks.index(dist.get_rank())) for ranks in hosts if dist.get_rank() in ranks)
        group = comm.group
        within = replace(comm, group=f"{group}_within", ranks=mine, size=len(mine))
        ranks_across = tuple(ranks[own] for ranks in hosts)
        share = comm.bytes // len(mine)
        across = replace(comm, group=f"{group}_across", ranks=ranks_across, size=len(hosts), bytes=share)
    beside = [across] if len(hosts) > 1 else []
    gather = replace(within, collective="all_gather", via=COPY)
    if comm.collective == "all_gather":
        return [*beside, gather]
    if comm.collective == "all_to_all" and len(hosts) == 1 and has_equal_parts(collective):
        return [replace(comm, via=COPY)]
    if comm.collective not in REDUCTIONS:
        return []
    exchange = replace(within, collective="all_to_all", via=COPY, bytes=travelling_bytes(collective.start))
    return [exchange, *beside, *([gather] if comm.collective == "all_reduce" else [])]


def has_equal_parts(collective: Collective) -> bool:
    """Whether an all-to-all gives every rank a part of the same size."""
    start = collective.start
    if start.target is EXCHANGE:
        return True
    if start.target is not torch.ops._c10d_functional.all_to_all_single.default:
        return False
    result = start.meta.get("val")
    splits = (*argument(start, 1), *argument(start, 2))
    static = isinstance(result, torch.Tensor) and all(isinstance(size, int) for size in (*result.shape, *splits))
    return static and len(set(splits)) == 1
