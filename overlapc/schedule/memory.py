"""Exact liveness: the storages that are live while each node runs, and their bytes.

A storage (a root buffer with all its aliases) is allocated at the node that defines it and freed after the
last node that accesses any of its names. A START accesses its buffers until its last WAIT is done, or until the end
without a WAIT. Inputs are live from the beginning, and are freed only if freeable and used; outputs are never freed.
Aliases (views, waits, in-place results) take no memory. A node's scratch lives while it runs. Pools
(`schedule/pools.py`) are allocated all the time, with the peak of the bytes that are in pools at once.

`analyze` computes all of this; `MemoryTimeline` updates it while nodes move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from overlapc.errors import ScheduleError
from overlapc.schedule.model import Kind, Schedule
from overlapc.schedule.pools import pooled


@dataclass(frozen=True)
class Lifetimes:
    """Facts about storages that do not depend on the order; nodes are indices into `schedule.nodes`.

    touches: ids of the storages that a node accesses and that can be freed. allocates: bytes that a node allocates;
    pool_allocates: the part of them in pools.
    """

    roots: tuple[str, ...]  # storage id -> name
    bytes: tuple[int, ...]  # storage id -> size
    in_pool: tuple[bool, ...]  # storage id -> whether it is in a pool
    touches: tuple[tuple[int, ...], ...]
    allocates: tuple[int, ...]
    pool_allocates: tuple[int, ...]
    scratch: tuple[int, ...]
    base_bytes: int  # inputs, which are live before the first node


@dataclass(frozen=True)
class MemoryProfile:
    """Live bytes of one order of a schedule."""

    during_bytes: tuple[int, ...]  # while each node runs, including scratch and pools
    base_bytes: int  # inputs, which are live before the first node
    pool_bytes: int  # peak of the bytes in pools
    last_touch: Mapping[str, int]  # root -> position of the last node that accesses it, for storages that are freed
    pool_during_bytes: tuple[int, ...]  # in pools, while each node runs

    @cached_property
    def frees(self) -> tuple[tuple[str, ...], ...]:
        """The roots to free after each node."""
        dying: list[list[str]] = [[] for _ in self.during_bytes]
        for root, at in self.last_touch.items():
            dying[at].append(root)
        return tuple(map(tuple, dying))

    @property
    def peak_bytes(self) -> int:
        """The peak of the live bytes."""
        return max(self.during_bytes, default=self.base_bytes)

    @cached_property
    def peak_at(self) -> int | None:
        """The position of the first node that runs at the peak; None without nodes."""
        return self.during_bytes.index(self.peak_bytes) if self.during_bytes else None


def lifetimes(schedule: Schedule) -> Lifetimes:
    """Return the storages of a schedule and the nodes that use them. Cached with the schedule; O(reads + writes)."""
    base = schedule.moved_from
    return schedule.fact(
        "lifetimes", lambda: _lifetimes(schedule) if base is None else _reordered(lifetimes(base), base, schedule)
    )


def _reordered(life: Lifetimes, old: Schedule, new: Schedule) -> Lifetimes:
    """Return `life` of schedule `old` with the node indices of `new`."""
    position = old.positions
    was = [position[node.name] for node in new.nodes]
    return replace(
        life,
        touches=tuple(life.touches[at] for at in was),
        allocates=tuple(life.allocates[at] for at in was),
        pool_allocates=tuple(life.pool_allocates[at] for at in was),
        scratch=tuple(life.scratch[at] for at in was),
    )


def _lifetimes(schedule: Schedule) -> Lifetimes:
    produced = {schedule.root(name) for node in schedule.nodes for name in node.writes}
    inputs = [
        buffer
        for name, buffer in schedule.buffers.items()
        if schedule.root(name) == name and (buffer.is_input or name not in produced)
    ]
    outputs = {schedule.root(name) for name in schedule.outputs}
    never_freed = outputs | {buffer.name for buffer in inputs if not buffer.freeable}
    ids: dict[str, int] = {}
    touches: list[dict[int, None]] = [{} for _ in schedule.nodes]
    pools = pooled(schedule)
    in_pool = pools.brought.keys() | pools.staged.keys()
    allocates, pool_allocates = [0] * len(schedule.nodes), [0] * len(schedule.nodes)
    seen = {buffer.name for buffer in inputs}
    waits: dict[int, list[int]] = {}
    for wait, start in schedule.started.items():
        waits.setdefault(start, []).append(wait)
    for at, node in enumerate(schedule.nodes):
        users = [touches[at]]
        never_waited = False
        if node.kind is Kind.START:
            users += [touches[wait] for wait in waits.get(at, ())]
            never_waited = at not in waits
        # A kernel that writes this rank's part of a gather's result allocates the memory of the whole result.
        gathered = [pools.shards[name] for name in node.writes if name in pools.shards]
        for name in (*node.reads, *node.writes, *gathered):
            root = schedule.root(name)
            if never_waited:
                never_freed.add(root)
            storage = ids.setdefault(root, len(ids))
            for user in users:
                user[storage] = None
        for name in (*node.writes, *gathered):
            root = schedule.root(name)
            if root not in seen and root not in pools.shards:
                seen.add(root)
                allocates[at] += schedule.buffers[root].bytes
                pool_allocates[at] += schedule.buffers[root].bytes if root in in_pool else 0
    freeable = {storage for root, storage in ids.items() if root not in never_freed}
    return Lifetimes(
        roots=tuple(ids),
        bytes=tuple(0 if root in pools.shards else schedule.buffers[root].bytes for root in ids),
        in_pool=tuple(root in in_pool for root in ids),
        touches=tuple(tuple(storage for storage in node if storage in freeable) for node in touches),
        allocates=tuple(allocates),
        pool_allocates=tuple(pool_allocates),
        scratch=tuple(node.scratch_bytes for node in schedule.nodes),
        base_bytes=sum(buffer.bytes for buffer in inputs),
    )


def analyze(schedule: Schedule) -> MemoryProfile:
    """Return live bytes and frees of a schedule in its current order. Cached with the schedule; O(nodes)."""
    return schedule.fact("memory", lambda: _profile(lifetimes(schedule), range(len(schedule.nodes))))


def _profile(life: Lifetimes, order: Sequence[int]) -> MemoryProfile:
    last: dict[int, int] = {}
    for at, node in enumerate(order):
        for storage in life.touches[node]:
            last[storage] = at
    freed, pool_freed = [0] * len(order), [0] * len(order)
    for storage, at in last.items():
        freed[at] += life.bytes[storage]
        pool_freed[at] += life.bytes[storage] if life.in_pool[storage] else 0
    live, in_pools = life.base_bytes, 0
    outside: list[int] = []
    pool_during: list[int] = []
    for at, node in enumerate(order):
        live += life.allocates[node]
        in_pools += life.pool_allocates[node]
        outside.append(live + life.scratch[node] - in_pools)
        pool_during.append(in_pools)
        live -= freed[at]
        in_pools -= pool_freed[at]
    pool_bytes = max(pool_during, default=0)
    during = tuple(size + pool_bytes for size in outside)
    last_touch = {life.roots[storage]: at for storage, at in last.items()}
    return MemoryProfile(during, life.base_bytes, pool_bytes, last_touch, tuple(pool_during))


class Placing:
    """Live bytes of an order to which nodes are appended. Nodes are indices into `schedule.nodes`.

    A pool keeps its size for the whole graph, so its peak adds to the peak outside of pools, whenever each is reached.
    Outside, the given order's peak stands for that of the nodes still to come.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.life = lifetimes(schedule)
        profile = analyze(schedule)
        self._outside, self._in_pools = self.life.base_bytes, 0  # live bytes
        self._most_outside, self._most_in_pools = profile.peak_bytes - profile.pool_bytes, 0
        self._reserved = [0, 0]  # bytes that nodes will allocate outside of pools and in pools, before the next node
        self.left = [0] * len(self.life.roots)  # storage -> nodes that still touch it
        for storages in self.life.touches:
            for storage in storages:
                self.left[storage] += 1

    def frees(self, node: int) -> int:
        """Return the bytes that are freed after `node` if it is placed next."""
        return sum(self.life.bytes[storage] for storage in self.life.touches[node] if self.left[storage] == 1)

    def needs(self, node: int) -> tuple[int, int]:
        """Return the bytes that `node` allocates outside of pools, scratch included, and in pools."""
        in_pools = self.life.pool_allocates[node]
        return self.life.allocates[node] - in_pools + self.life.scratch[node], in_pools

    def reserve(self, node: int, times: int = 1) -> None:
        """Count what `node` needs as reserved; with `times` -1, no longer."""
        for kind, size in enumerate(self.needs(node)):
            self._reserved[kind] += times * size

    def peak_with(self, outside: int, in_pools: int) -> int:
        """Return the peak if these many bytes more are live now."""
        most_in_pools = max(self._most_in_pools, self._in_pools + in_pools)
        return max(self._most_outside, self._outside + outside) + most_in_pools

    def peak_at(self, node: int) -> int:
        """Return the peak if `node` is next, with what is reserved."""
        outside, in_pools = self.needs(node)
        return self.peak_with(outside + self._reserved[0], in_pools + self._reserved[1])

    def place(self, node: int) -> None:
        """Append `node` to the order."""
        life, in_pools = self.life, self.life.pool_allocates[node]
        self._outside += life.allocates[node] - in_pools
        self._in_pools += in_pools
        self._most_in_pools = max(self._most_in_pools, self._in_pools)
        for storage in life.touches[node]:
            self.left[storage] -= 1
            if self.left[storage]:
                continue
            if life.in_pool[storage]:
                self._in_pools -= life.bytes[storage]
            else:
                self._outside -= life.bytes[storage]


class GivenOrder:
    """Live bytes in the order of a schedule, for ranges of nodes; as pairs: outside of pools, and in pools."""

    def __init__(self, schedule: Schedule) -> None:
        life, profile = lifetimes(schedule), analyze(schedule)
        outside = [size - profile.pool_bytes for size in profile.during_bytes]
        made = (each - in_pools for each, in_pools in zip(life.allocates, life.pool_allocates, strict=True))
        self._during = RangeMax(outside), RangeMax(profile.pool_during_bytes)
        self._before = (
            [size - new - scratch for size, new, scratch in zip(outside, made, life.scratch, strict=True)],
            [size - new for size, new in zip(profile.pool_during_bytes, life.pool_allocates, strict=True)],
        )

    def rise(self, low: int, high: int) -> list[int]:
        """Return how many more bytes than before node `low` are live at most from there to the start of node `high`."""
        pairs = zip(self._during, self._before, strict=True)
        return [during.most(low, high) - before[low] for during, before in pairs]


class RangeMax:
    """Maximum of any range of a list, from a table of the maxima of ranges of 2, 4, 8, ... that is built once."""

    def __init__(self, values: Sequence[int]) -> None:
        self.rows = [list(values)]
        width = 1
        while 2 * width <= len(values):
            row = self.rows[-1]
            self.rows.append([max(row[at], row[at + width]) for at in range(len(values) - 2 * width + 1)])
            width *= 2

    def most(self, low: int, high: int) -> int:
        """Return the maximum of values[low:high], which must not be empty."""
        level = (high - low).bit_length() - 1
        row = self.rows[level]
        return max(row[low], row[high - (1 << level)])


class _Row:
    """A list of numbers and their maximum, which is recomputed only after it may have decreased."""

    def __init__(self, values: Sequence[int]) -> None:
        self.values = list(values)
        self._most: int | None = None

    @property
    def most(self) -> int:
        if self._most is None:
            self._most = max(self.values, default=0)
        return self._most

    def put(self, low: int, values: Sequence[int]) -> None:
        """Replace the values from position `low` on."""
        high = low + len(values)
        if self._most is not None:
            most = max(values)
            if most >= self._most:
                self._most = most
            elif max(self.values[low:high]) == self._most:
                self._most = None
        self.values[low:high] = values


class _Window(NamedTuple):
    """Live bytes and frees within a range of positions."""

    outside: list[int]  # bytes outside of pools while each node runs
    in_pools: list[int]
    deaths: dict[int, int]  # storages that are freed after another node than before -> that node


class MemoryTimeline:
    """Live bytes of an order that changes. Nodes are indices into the `schedule.nodes` that were passed in.

    Reordering a range of positions changes the live bytes only within that range, because before and after it the same
    nodes have run. The cost of `try_window` and `apply` therefore depends on the range, not on the schedule.

    check: recompute everything after each change, and raise ScheduleError for a difference (for debugging).
    """

    def __init__(self, schedule: Schedule, *, check: bool = False) -> None:
        self._schedule, self._check = schedule, check
        self._life = lifetimes(schedule)
        self.order: list[int] = list(range(len(schedule.nodes)))
        self.position: list[int] = list(self.order)
        self._death: dict[int, int] = {}  # storage -> the node after which it is freed
        for node in self.order:
            for storage in self._life.touches[node]:
                self._death[storage] = node
        # node -> bytes that it allocates, and that are freed after it, outside of pools; and those in pools
        pairs = zip(self._life.allocates, self._life.pool_allocates, strict=True)
        self._allocates = [all_bytes - in_pools for all_bytes, in_pools in pairs]
        self._freed, self._pool_freed = [0] * len(self.order), [0] * len(self.order)
        self._has_pools = any(self._life.in_pool)
        for storage, node in self._death.items():
            self._free(node, storage, 1)
        whole = self._window(0, self.order)
        self.outside, self.in_pools = _Row(whole.outside), _Row(whole.in_pools)
        self._tried: tuple[int, list[int], _Window] | None = None

    @property
    def during_bytes(self) -> list[int]:
        """The bytes that are live while each node runs, in the current order."""
        return [size + self.in_pools.most for size in self.outside.values]

    @property
    def peak_bytes(self) -> int:
        """The peak of the current order."""
        return (self.outside.most if self.order else self._life.base_bytes) + self.in_pools.most

    def try_window(self, low: int, nodes: Sequence[int]) -> int:
        """Return the peak within the positions from `low` if `nodes` (the ones already there) were in this order.

        If pools would become larger, it is the peak over all positions. That pools may become smaller is ignored.
        """
        found = self._try(low, nodes)
        in_pools = max(found.in_pools)
        if in_pools > self.in_pools.most:
            return max(self.outside.most, *found.outside) + in_pools
        return max(found.outside) + self.in_pools.most

    def try_pools(self, low: int, nodes: Sequence[int]) -> int:
        """Return the peak bytes in pools within the positions from `low` if `nodes` were in this order."""
        return max(self._try(low, nodes).in_pools)

    def apply(self, low: int, nodes: Sequence[int]) -> None:
        """Reorder the nodes at the positions from `low` into the order `nodes`; faster if this order was tried last."""
        found, self._tried = self._try(low, nodes), None
        self._free_after(found.deaths)
        self._death.update(found.deaths)
        self.order[low : low + len(nodes)] = nodes
        self.outside.put(low, found.outside)
        self.in_pools.put(low, found.in_pools)
        for at, node in enumerate(nodes, low):
            self.position[node] = at
        if self._check:
            self._compare(low, low + len(nodes))

    def move(self, low: int, high: int, to: int) -> None:
        """Move the block at positions low..high-1 so that it begins at `to` (counted without the block)."""
        block = self.order[low:high]
        if to < low:
            self.apply(to, block + self.order[to:low])
        elif to > low:
            self.apply(low, self.order[high : high + to - low] + block)

    def _try(self, low: int, nodes: Sequence[int]) -> _Window:
        """Return the result of `_window`, cached for the order that was tried last."""
        tried = self._tried
        if tried is None or tried[0] != low or tried[1] != nodes:
            tried = self._tried = low, list(nodes), self._window(low, nodes)
        return tried[2]

    def _free(self, node: int, storage: int, times: int) -> None:
        """Add a storage to the bytes freed after `node` (times=1), or subtract it (times=-1)."""
        freed = self._pool_freed if self._life.in_pool[storage] else self._freed
        freed[node] += times * self._life.bytes[storage]

    def _free_after(self, deaths: Mapping[int, int], times: int = 1) -> None:
        """Free storages after the nodes in `deaths` instead of the present ones (times=1), or undo that (times=-1)."""
        for storage, node in deaths.items():
            self._free(self._death[storage], storage, -times)
            self._free(node, storage, times)

    def _live_before(self, at: int) -> tuple[int, int]:
        """Return the bytes live outside of pools and in pools just before the node at position `at` runs."""
        if not at:
            return self._life.base_bytes, 0
        node = self.order[at - 1]
        outside = self.outside.values[at - 1] - self._life.scratch[node] - self._freed[node]
        return outside, self.in_pools.values[at - 1] - self._pool_freed[node]

    def _compare(self, low: int, high: int) -> None:
        """Raise ScheduleError unless the incremental numbers equal recomputed ones."""
        whole = _profile(self._life, self.order).during_bytes
        for at, (kept, found) in enumerate(zip(self.during_bytes, whole, strict=True)):
            if kept != found:
                raise ScheduleError(
                    f"{self._schedule.name}: after a change of positions {low} to {high - 1}, {kept} B are recorded as"
                    f" live at {self._schedule.nodes[self.order[at]].name}, but {found} B are live\n"
                    "hint: please report the schedule; OVERLAPC_DUMP=passes writes it"
                )
        if self.peak_bytes != max(whole, default=self._life.base_bytes):
            raise ScheduleError(
                f"{self._schedule.name}: the recorded peak is {self.peak_bytes} B, but the peak is {max(whole)} B"
            )

    def _window(self, low: int, nodes: Sequence[int]) -> _Window:
        life, death, position = self._life, self._death, self.position
        high = low + len(nodes)
        last: dict[int, int] = {}
        for node in nodes:
            for storage in life.touches[node]:
                if low <= position[death[storage]] < high:
                    last[storage] = node
        deaths = {storage: node for storage, node in last.items() if death[storage] != node}
        outside, in_pools = self._live_before(low)
        self._free_after(deaths)
        during = _running(nodes, outside, self._allocates, self._freed)
        during = [size + life.scratch[node] for size, node in zip(during, nodes, strict=True)]
        pools = [0] * len(nodes)
        if self._has_pools:
            pools = _running(nodes, in_pools, life.pool_allocates, self._pool_freed)
        self._free_after(deaths, -1)
        return _Window(during, pools, deaths)


def _running(nodes: Sequence[int], live: int, allocates: Sequence[int], freed: Sequence[int]) -> list[int]:
    """Return the live bytes while each of `nodes` runs, in this order; `live`: those before the first."""
    during = []
    for node in nodes:
        live += allocates[node]
        during.append(live)
        live -= freed[node]
    return during
