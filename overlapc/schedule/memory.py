"""Exact liveness: which storages exist while each node runs, and what that takes.

A storage (a root buffer with all its aliases) is allocated at the node that defines it and freed after the
last node that touches any of its names. A start touches what it reads and writes until its last wait is done;
one without a wait, until the end. Inputs are there from the beginning and die only if freeable and used; outputs
never die. Aliases (views, waits, in-place results) take nothing. A node's scratch lives while it runs.

`analyze` computes all of it; `MemoryTimeline` keeps it up to date while nodes move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from overlapc.errors import ScheduleError
from overlapc.schedule.model import Kind, Schedule


@dataclass(frozen=True)
class Lifetimes:
    """What does not depend on the order, with nodes as indices into `schedule.nodes`.

    touches: storages (ids) that a node keeps alive and that may die; allocates: bytes that come to be at it.
    """

    roots: tuple[str, ...]  # storage id -> name, for storages that may die
    bytes: tuple[int, ...]  # storage id -> size
    touches: tuple[tuple[int, ...], ...]
    allocates: tuple[int, ...]
    scratch: tuple[int, ...]
    base_bytes: int  # inputs: what is there before the first node


@dataclass(frozen=True)
class MemoryProfile:
    """Live bytes of one order of a schedule."""

    during_bytes: tuple[int, ...]  # while each node runs, scratch included
    base_bytes: int  # inputs: what is there before the first node
    last_touch: Mapping[str, int]  # root -> position of the last node that touches it, of those that may die

    @cached_property
    def frees(self) -> tuple[tuple[str, ...], ...]:
        """Roots to free after each node."""
        dying: list[list[str]] = [[] for _ in self.during_bytes]
        for root, at in self.last_touch.items():
            dying[at].append(root)
        return tuple(map(tuple, dying))

    @property
    def peak_bytes(self) -> int:
        """The most that is live at any moment."""
        return max(self.during_bytes, default=self.base_bytes)

    @cached_property
    def peak_at(self) -> int | None:
        """Position of the first node that runs at the peak; None without nodes."""
        return self.during_bytes.index(self.peak_bytes) if self.during_bytes else None


def lifetimes(schedule: Schedule) -> Lifetimes:
    """Storages of a schedule and who touches them. Kept with the schedule; O(names read and written)."""
    base = schedule.moved_from
    return schedule.fact(
        "lifetimes", lambda: _lifetimes(schedule) if base is None else _reordered(lifetimes(base), base, schedule)
    )


def _reordered(life: Lifetimes, old: Schedule, new: Schedule) -> Lifetimes:
    """`life` of the order `old`, its nodes counted as in `new`."""
    position = old.positions
    was = [position[node.name] for node in new.nodes]
    return replace(
        life,
        touches=tuple(life.touches[at] for at in was),
        allocates=tuple(life.allocates[at] for at in was),
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
    immortal = outputs | {buffer.name for buffer in inputs if not buffer.freeable}
    ids: dict[str, int] = {}
    touches: list[dict[int, None]] = [{} for _ in schedule.nodes]
    allocates = [0] * len(schedule.nodes)
    seen = {buffer.name for buffer in inputs}
    waits: dict[int, list[int]] = {}
    for wait, start in schedule.started.items():
        waits.setdefault(start, []).append(wait)
    for at, node in enumerate(schedule.nodes):
        users = [touches[at]]
        endless = False
        if node.kind is Kind.START:
            users += [touches[wait] for wait in waits.get(at, ())]
            endless = at not in waits
        for name in (*node.reads, *node.writes):
            root = schedule.root(name)
            if endless:
                immortal.add(root)
            storage = ids.setdefault(root, len(ids))
            for user in users:
                user[storage] = None
        for name in node.writes:
            root = schedule.root(name)
            if root not in seen:
                seen.add(root)
                allocates[at] += schedule.buffers[root].bytes
    mortal = {storage for root, storage in ids.items() if root not in immortal}
    return Lifetimes(
        roots=tuple(ids),
        bytes=tuple(schedule.buffers[root].bytes for root in ids),
        touches=tuple(tuple(storage for storage in node if storage in mortal) for node in touches),
        allocates=tuple(allocates),
        scratch=tuple(node.scratch_bytes for node in schedule.nodes),
        base_bytes=sum(buffer.bytes for buffer in inputs),
    )


def analyze(schedule: Schedule) -> MemoryProfile:
    """Live bytes and frees of a schedule in its present order. Kept with the schedule; O(nodes)."""
    return schedule.fact("memory", lambda: _profile(lifetimes(schedule), range(len(schedule.nodes))))


def _profile(life: Lifetimes, order: Sequence[int]) -> MemoryProfile:
    last: dict[int, int] = {}
    for at, node in enumerate(order):
        for storage in life.touches[node]:
            last[storage] = at
    freed = [0] * len(order)
    for storage, at in last.items():
        freed[at] += life.bytes[storage]
    live = life.base_bytes
    during: list[int] = []
    for at, node in enumerate(order):
        live += life.allocates[node]
        during.append(live + life.scratch[node])
        live -= freed[at]
    return MemoryProfile(tuple(during), life.base_bytes, {life.roots[storage]: at for storage, at in last.items()})


class MemoryTimeline:
    """Live bytes of an order that changes. Nodes are indices into `schedule.nodes` as it was given.

    Reordering a stretch of the order changes what is live only inside that stretch: before and after it the
    same nodes have run. So `try_window` and `apply` cost the stretch, not the schedule.

    check: after every change all is computed from scratch too, and a difference is a ScheduleError (for debugging).
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
        self._freed = [0] * len(self.order)  # node -> bytes freed after it
        for storage, node in self._death.items():
            self._freed[node] += self._life.bytes[storage]
        self.during_bytes: list[int] = list(_profile(self._life, self.order).during_bytes)
        self._peak: int | None = None
        self._tried: tuple[int, list[int], tuple[list[int], dict[int, int]]] | None = None  # a window and what is in it

    @property
    def peak_bytes(self) -> int:
        """The peak of the present order; found again only when a move may have lowered it."""
        if self._peak is None:
            self._peak = max(self.during_bytes, default=self._life.base_bytes)
        return self._peak

    def try_window(self, low: int, nodes: Sequence[int]) -> int:
        """The peak within positions low.. if `nodes` (those already there) stood in this order instead."""
        found = self._window(low, nodes)
        self._tried = low, list(nodes), found
        return max(found[0])

    def apply(self, low: int, nodes: Sequence[int]) -> None:
        """Put `nodes`, which stand at positions low.. now, in this order there. Costs less if it was tried last."""
        tried, self._tried = self._tried, None
        if tried is not None and tried[0] == low and tried[1] == list(nodes):
            during, deaths = tried[2]
        else:
            during, deaths = self._window(low, nodes)
        for storage, node in deaths.items():
            size = self._life.bytes[storage]
            self._freed[self._death[storage]] -= size
            self._freed[node] += size
            self._death[storage] = node
        high = low + len(nodes)
        if self._peak is not None:
            most = max(during)
            if most >= self._peak:
                self._peak = most
            elif max(self.during_bytes[low:high]) == self._peak:
                self._peak = None
        self.order[low:high] = nodes
        self.during_bytes[low:high] = during
        for at, node in enumerate(nodes, low):
            self.position[node] = at
        if self._check:
            self._compare(low, high)

    def move(self, low: int, high: int, to: int) -> None:
        """Move the block at positions low..high-1 so that it begins at `to` (counted without the block)."""
        block = self.order[low:high]
        if to < low:
            self.apply(to, block + self.order[to:low])
        elif to > low:
            self.apply(low, self.order[high : high + to - low] + block)

    def live_before(self, at: int) -> int:
        """Bytes that are live just before the node at a position begins."""
        node = self.order[at]
        return self.during_bytes[at] - self._life.scratch[node] - self._life.allocates[node]

    def _compare(self, low: int, high: int) -> None:
        """ScheduleError unless what is kept equals what recomputing gives."""
        whole = _profile(self._life, self.order).during_bytes
        for at, (kept, found) in enumerate(zip(self.during_bytes, whole, strict=True)):
            if kept != found:
                raise ScheduleError(
                    f"{self._schedule.name}: after positions {low} to {high - 1} changed, {kept} B are said to be live"
                    f" at {self._schedule.nodes[self.order[at]].name}, and {found} B are\n"
                    "hint: please report the schedule; OVERLAPC_DUMP=passes writes it"
                )
        if self.peak_bytes != max(whole, default=self._life.base_bytes):
            raise ScheduleError(
                f"{self._schedule.name}: the peak is said to be {self.peak_bytes} B, not {max(whole)} B"
            )

    def _window(self, low: int, nodes: Sequence[int]) -> tuple[list[int], dict[int, int]]:
        """(live bytes while each node runs, storages that die here -> their new last node)."""
        life, death, position = self._life, self._death, self.position
        high = low + len(nodes)
        live = self.live_before(low)
        deaths: dict[int, int] = {}
        for node in nodes:
            for storage in life.touches[node]:
                if low <= position[death[storage]] < high:
                    deaths[storage] = node
        freed = {node: self._freed[node] for node in nodes}
        for storage, node in deaths.items():
            old = death[storage]
            if old != node:
                freed[old] -= life.bytes[storage]
                freed[node] += life.bytes[storage]
        during: list[int] = []
        for node in nodes:
            live += life.allocates[node]
            during.append(live + life.scratch[node])
            live -= freed[node]
        return during, deaths
