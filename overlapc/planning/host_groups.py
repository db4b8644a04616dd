"""Divides a process group that spans several hosts into groups within each host and groups of one rank per host.

    dp = 0 1 2 3 | 4 5 6 7   ->   dp_within = 0 1 2 3, dp_across = 0 4   (on rank 0, with four ranks per host)

Both parts are process groups of torch. All ranks of the divided group create their parts in the same order; the parts
live as long as the divided group.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from overlapc.fx.comm.group_names import OURS
from overlapc.fx.versions.sharding import resolve_group
from overlapc.runtime.copies.pool import timeout_s


@dataclass(frozen=True, slots=True)
class HostGroups:
    """The two process groups that this rank is in: torch's names of them, and their ranks in order."""

    within: str
    across: str
    ranks_within: tuple[int, ...]
    ranks_across: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DividedGroup:
    """A divided process group as it is cached on disk, with all that another process needs to divide it again."""

    group: str  # torch's name; cache keys of graphs and steps contain it, with its ranks
    name: str  # our label of the group, equal on all ranks
    ranks: tuple[int, ...]
    parts: HostGroups


def hosts_of(ranks: Sequence[int], host_of: Callable[[int], Hashable]) -> list[tuple[int, ...]] | None:
    """Return the ranks of each host; None unless each host's ranks are consecutive in the group and equally many."""
    hosts = [tuple(of_one) for _, of_one in itertools.groupby(ranks, host_of)]
    different = len({host_of(host[0]) for host in hosts}) == len(hosts)
    return hosts if different and len({len(host) for host in hosts}) == 1 else None


def process_groups() -> int:
    """Return the number of process groups that this rank has created. torch derives the next group's name from it, so
    all ranks that create a group together must have the same count."""
    return len(distributed_c10d._world.pg_names)


_made: weakref.WeakKeyDictionary[Any, HostGroups] = weakref.WeakKeyDictionary()


def divided(group: str, name: str, hosts: Sequence[tuple[int, ...]], *, alone: bool) -> HostGroups | None:
    """Return the parts of a divided process group, creating them if needed.

    name: our label of the group, equal on all ranks. alone: no other rank calls this now, so parts cannot be created;
    return None if they do not exist.
    """
    whole = resolve_group(group)
    found = _made.get(whole)
    mine, own = next((host, host.index(dist.get_rank())) for host in hosts if dist.get_rank() in host)
    if found is not None and found.ranks_within == mine:
        return found
    if alone:
        return None
    across = tuple(host[own] for host in hosts)
    limit = timedelta(seconds=timeout_s(group))

    def made(ranks: Sequence[int], which: str) -> str:
        of_these: Any = dist.new_group(
            list(ranks), timeout=limit, use_local_synchronization=True, group_desc=f"{OURS}{name}_{which}"
        )
        return str(of_these.group_name)

    found = _made[whole] = HostGroups(made(mine, "within"), made(across, "across"), mine, across)
    return found


def divided_again(cached: DividedGroup, hosts: Sequence[tuple[int, ...]] | None) -> bool:
    """Whether a group has the parts that a cached graph names, creating the parts if needed. Collective: every rank of
    the group must call it.

    hosts: the present ranks of each host.
    """
    if hosts is None or cached.parts.ranks_within not in hosts:
        return False
    return divided(cached.group, cached.name, hosts, alone=False) == cached.parts


def still_divided(cached: DividedGroup) -> bool:
    """Whether a group has the parts that a cached graph names, without creating any."""
    return _made.get(resolve_group(cached.group)) == cached.parts
