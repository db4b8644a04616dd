"""Buffers of a schedule in pools, the memory that ranks share: results of copies, and kernel outputs that copies send.

    c = kernel(p); a = all_gather(c) @dp via copy; w = wait(a); y = kernel(w)

`a` is in the pool of @dp, and is read from there. So is `c`, which is this rank's part of `a`: the kernel writes it
there. Results that outlive the graph are not in pools: if `a` is one, only `c` is in the pool, where peers fetch it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from overlapc.schedule.collective_kinds import COPY
from overlapc.schedule.model import Kind, Schedule


@dataclass(frozen=True, slots=True)
class Pooled:
    """The storages of a schedule that are in pools, by name."""

    brought: Mapping[str, str]  # result of a START -> name of the START
    shards: Mapping[str, str]  # output of a kernel -> result of the gather of which it is this rank's part
    staged: Mapping[str, str]  # the same for gathers whose results outlive the graph

    @property
    def written(self) -> dict[str, str]:
        """The kernel outputs that are in pools -> the gather's result."""
        return {**self.shards, **self.staged}


def pooled(schedule: Schedule) -> Pooled:
    """Return the storages that are in pools. Does not depend on the order of nodes; cached with the schedule."""
    base = schedule.moved_from
    return schedule.fact("pooled", lambda: _pooled(schedule) if base is None else pooled(base))


def _pooled(schedule: Schedule) -> Pooled:
    starts = [node for node in schedule.starts() if node.comm is not None and node.comm.via == COPY]
    if not starts:
        return Pooled({}, {}, {})
    outlives = {schedule.root(name) for name in schedule.outputs}
    waited = {schedule.nodes[start].name for start in schedule.started.values()}
    brought: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    for start in starts:
        roots = [schedule.root(name) for name in start.writes]
        if start.name not in waited:
            continue
        if outlives.isdisjoint(roots):
            brought.update((root, start.name) for root in roots)
        if start.comm is not None and start.comm.collective == "all_gather" and len(start.reads) == len(roots):
            pairs += zip(start.reads, roots, strict=True)
    made, readers = _made_by_kernels(schedule), _readers(schedule)
    written = {shard: root for shard, root in pairs if shard in made - outlives and readers.get(shard) == 1}
    shards = {shard: root for shard, root in written.items() if root in brought}
    return Pooled(brought, shards, {shard: root for shard, root in written.items() if root not in brought})


def _made_by_kernels(schedule: Schedule) -> set[str]:
    """Return the storages that a generated kernel writes and that have no aliases."""
    aliased = {schedule.root(name) for name, buffer in schedule.buffers.items() if buffer.alias_of is not None}
    kernels = (node for node in schedule.nodes if node.kind is Kind.KERNEL)
    return {name for node in kernels for name in node.writes if schedule.root(name) == name} - aliased


def _readers(schedule: Schedule) -> dict[str, int]:
    """Return the number of nodes that read each name."""
    found: dict[str, int] = {}
    for node in schedule.nodes:
        for name in node.reads:
            found[name] = found.get(name, 0) + 1
    return found
