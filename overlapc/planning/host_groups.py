"""A process group of several hosts as groups within each of them, and groups of one rank of each.

    dp = 0 1 2 3 | 4 5 6 7   ->   dp_within = 0 1 2 3, dp_across = 0 4   (on rank 0, with four ranks a host)

Both are process groups of torch's. All ranks of the divided one make theirs in the same order; both
exist as long as it.
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

from overlapc.fx.group_names import OURS
from overlapc.fx.versions import resolve_group
from overlapc.runtime.copies.pool import timeout_s


@dataclass(frozen=True, slots=True)
class HostGroups:
    """This rank's two groups, by torch's names, and who is in them, in order."""

    within: str
    across: str
    ranks_within: tuple[int, ...]
    ranks_across: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DividedGroup:
    """What is kept on disk of a group that is divided: enough to divide it in another process."""

    group: str  # torch's name; the keys of cached graphs and steps hold it, with its ranks
    name: str  # equal on all ranks
    ranks: tuple[int, ...]
    parts: HostGroups


def hosts_of(ranks: Sequence[int], host_of: Callable[[int], Hashable]) -> list[tuple[int, ...]] | None:
    """The ranks of each host; None unless hosts follow each other in the group, with the same number of ranks each."""
    hosts = [tuple(of_one) for _, of_one in itertools.groupby(ranks, host_of)]
    different = len({host_of(each[0]) for each in hosts}) == len(hosts)
    return hosts if different and len({len(each) for each in hosts}) == 1 else None


def process_groups() -> int:
    """How many this rank is in. torch names the next one after that: ranks that make one together have to agree."""
    return len(distributed_c10d._world.pg_names)


_made: weakref.WeakKeyDictionary[Any, HostGroups] = weakref.WeakKeyDictionary()


def divided(group: str, name: str, hosts: Sequence[tuple[int, ...]], *, alone: bool) -> HostGroups | None:
    """The groups that a group is divided into; made unless they exist. name: of the group, equal on all ranks.

    alone: no other rank comes here now, so that none can be made: None where there are none.
    """
    whole = resolve_group(group)
    found = _made.get(whole)
    mine, own = next((each, each.index(dist.get_rank())) for each in hosts if dist.get_rank() in each)
    if found is not None and found.ranks_within == mine:
        return found
    if alone:
        return None
    across = tuple(each[own] for each in hosts)
    limit = timedelta(seconds=timeout_s(group))

    def made(ranks: Sequence[int], which: str) -> str:
        of_these: Any = dist.new_group(
            list(ranks), timeout=limit, use_local_synchronization=True, group_desc=f"{OURS}{name}_{which}"
        )
        return str(of_these.group_name)

    found = _made[whole] = HostGroups(made(mine, "within"), made(across, "across"), mine, across)
    return found


def divided_again(kept: DividedGroup, hosts: Sequence[tuple[int, ...]] | None) -> bool:
    """Whether a group has the parts that a cached graph names; they are made unless they exist. All its ranks meet.

    hosts: the ranks of each host now.
    """
    if hosts is None or kept.parts.ranks_within not in hosts:
        return False
    return divided(kept.group, kept.name, hosts, alone=False) == kept.parts


def still_divided(kept: DividedGroup) -> bool:
    """Whether a group has the parts that a cached graph names."""
    return _made.get(resolve_group(kept.group)) == kept.parts
