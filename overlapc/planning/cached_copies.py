"""Reopens the copies of graphs from the disk cache on memory pools of this process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch._subclasses.fake_tensor import unset_fake_temporarily

from overlapc.agreement.rank_agreement import GraphAgreement
from overlapc.codegen.compiled_graph import CompiledGraph
from overlapc.config import Config
from overlapc.errors import NoSharedMemory
from overlapc.planning.copy_reach import CopyReach
from overlapc.planning.host_groups import divided_again, still_divided
from overlapc.runtime.copies.command_queues import unsupported
from overlapc.runtime.copies.pool import GraphCopies, Pool, StoredCopies, Wanted, open_pools, reusable_pools

CopiesByPool = Mapping[str, GraphCopies]  # the copies of one graph, by the name of their pool


def reopened(
    graphs: Sequence[CompiledGraph], config: Config, agreement: GraphAgreement | None
) -> list[CopiesByPool] | None:
    """Return the copies of each graph, on pools that all ranks open together.

    None, on all ranks, if there is no `agreement` between ranks, if copies no longer reach all ranks of a group, if a
    group is not divided into the same hosts, or if a rank has no memory to share.
    """
    stored = [copies for graph in graphs for copies in graph.copies]
    if not stored:
        return [{} for _ in graphs]
    if agreement is None:
        return None
    device = stored[0].device
    reason = unsupported(device, config.cache_dir) or ""
    reach = CopyReach.agreed_on(agreement, config, device, reason, [copies.ranks for copies in stored])
    if reach.none or any(reach.apart(ranks, device.type) for ranks in reach.groups):
        return None
    groups = {divided.group: divided for graph in graphs for divided in graph.divided}.values()
    if groups:  # the same on all ranks: the agreed orders of collectives name the parts of divided groups
        same = [divided_again(divided, reach.hosts(divided.ranks)) for divided in groups]
        if not all(map(json.loads, agreement.exchange("groups of several hosts", json.dumps(all(same))))):
            return None
    try:
        with unset_fake_temporarily():  # in fake mode, operations on the memory would be traced instead of executed
            pools = open_pools(_wanted(stored), device, agreement.ranks, agreement.exchange, config.cache_dir)
    except NoSharedMemory:  # raised on all ranks: they plan the graph again, which reports the reason
        return None
    return _on(pools, graphs)


def still_open(graphs: Sequence[CompiledGraph]) -> list[CopiesByPool] | None:
    """Return the copies of each graph, on pools that are already open, or None if a pool is closed or too small.

    Other ranks are not asked.
    """
    if not all(still_divided(divided) for graph in graphs for divided in graph.divided):
        return None
    stored = [copies for graph in graphs for copies in graph.copies]
    pools = reusable_pools(_wanted(stored), stored[0].device) if stored else {}
    return None if pools is None else _on(pools, graphs)


def _wanted(stored: Sequence[StoredCopies]) -> list[Wanted]:
    """Return what each pool must provide for all graphs: its largest size, as graphs run one after the other."""
    found: dict[str, Wanted] = {}
    for copies in stored:
        wanted = copies.wanted
        other = found.setdefault(copies.group, wanted)
        if other is not wanted:
            most = max(other.bytes, wanted.bytes)
            found[copies.group] = replace(other, bytes=most, layout=f"{other.layout}\n{wanted.layout}")
    return [found[group] for group in sorted(found)]


def _on(pools: Mapping[str, Pool], graphs: Sequence[CompiledGraph]) -> list[CopiesByPool]:
    return [
        {copies.group: GraphCopies.reopened(copies, pools[copies.group]) for copies in graph.copies} for graph in graphs
    ]
