"""The search of `passes/refine.py` in C (`search.c`): the same moves, bit for bit, in a fraction of the time."""

from __future__ import annotations

import ctypes
import weakref
from array import array
from collections.abc import Iterable, Mapping, Sequence
from random import Random
from typing import Any, Protocol

from overlapc.estimators.simulator.native import NativeReplay
from overlapc.schedule.memory import lifetimes
from overlapc.schedule.model import Schedule

_Address = ctypes.c_void_p


class _Lists(ctypes.Structure):
    """`Lists` of search.c."""

    _fields_ = (("starts", _Address), ("items", _Address))


class _Facts(ctypes.Structure):
    """`Facts` of search.c."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("nodes", "storages", "clocks", "computes", "collectives")),
        ("replays", _Address * 2),
        *((name, _Lists) for name in ("preds", "succs", "touches", "alike")),
        *((name, _Address) for name in ("group", "compute", "collective", "fixed", "blocking", "in_pool")),
        *((name, _Address) for name in ("allocates", "pool_allocates", "scratch", "bytes")),
        *((name, ctypes.c_longlong) for name in ("base_bytes", "limit", "peak_without_gain", "pool_bytes", "final")),
        *((name, ctypes.c_long) for name in ("replays_in_round", "blocks_before")),
        ("random", _Address),
        *((name, ctypes.c_double) for name in ("collectives_share", "worth_repeating")),
        *((name, ctypes.c_int) for name in ("powers", "most_together", "proposals_per_replay", "blocks_per_replay")),
        ("rounds_without_gain", ctypes.c_int),
    )


class Found(ctypes.Structure):
    """`Found` of search.c: the times of the present order, counts, and the best order."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("step_ns", "both_ns", "exposed_ns")),
        *((name, ctypes.c_long) for name in ("made", "proposals", "replays")),
        ("best", ctypes.POINTER(ctypes.c_int)),
    )


class _Order(Protocol):
    """What a search needs of `passes.order.Order`."""

    schedule: Schedule
    preds: list[list[int]]
    succs: list[list[int]]
    fixed: list[bool]
    blocking: set[int]


class _Search(Protocol):
    """What a search in C needs of `passes.refine.Search`."""

    @property
    def order(self) -> _Order: ...

    random: Random
    compute: list[int]
    collectives: list[int]
    alike: Sequence[Sequence[int]]
    limit: int
    peak_without_gain: int
    pool_bytes: int
    final: int | None
    replays_in_round: int


class NativeSearch:
    """A `Search` in C that begins where the one in Python is."""

    def __init__(self, search: _Search, replays: Sequence[NativeReplay], rules: Mapping[str, float]) -> None:
        """rules: the constants of refine.py, by the names that they have in search.c."""
        self._library, self._replays = replays[0].library, replays
        self._arrays: list[array[Any]] = []  # must live as long as the search, which reads them
        order, life = search.order, lifetimes(search.order.schedule)
        groups = {id(group): group for group in search.alike}
        number = {key: index for index, key in enumerate(groups)}
        outside = [whole - part for whole, part in zip(life.allocates, life.pool_allocates, strict=True)]
        facts = _Facts(
            nodes=len(life.touches),
            storages=len(life.roots),
            clocks=len(replays),
            computes=len(search.compute),
            collectives=len(search.collectives),
            replays=(_Address * 2)(*(replay.pointer for replay in replays)),
            preds=self._lists(order.preds),
            succs=self._lists(order.succs),
            touches=self._lists(life.touches),
            alike=self._lists(list(groups.values())),
            group=self._array("i", [number[id(group)] for group in search.alike]),
            compute=self._array("i", search.compute),
            collective=self._array("i", search.collectives),
            fixed=self._array("b", order.fixed),
            blocking=self._array("b", [at in order.blocking for at in range(len(order.fixed))]),
            in_pool=self._array("b", life.in_pool),
            allocates=self._array("q", outside),
            pool_allocates=self._array("q", life.pool_allocates),
            scratch=self._array("q", life.scratch),
            bytes=self._array("q", life.bytes),
            base_bytes=life.base_bytes,
            limit=search.limit,
            peak_without_gain=search.peak_without_gain,
            pool_bytes=search.pool_bytes,
            final=-1 if search.final is None else search.final,
            replays_in_round=search.replays_in_round,
            blocks_before=sum(replay.blocks_replayed for replay in replays),
            random=self._array("I", search.random.getstate()[1]),
            **rules,
        )
        self._search = self._library.search_new(ctypes.byref(facts))
        self._end = weakref.finalize(self, self._library.search_free, self._search)

    def run(self, effort: int, most_moves: int | None) -> Found:
        """Search on until this much effort is used up in all, or so many moves are made."""
        address = self._library.search_run(self._search, effort, -1 if most_moves is None else most_moves)
        found = Found.from_address(address)
        for replay in self._replays:
            replay.raise_error()
        return found

    def _array(self, code: str, values: Iterable[int]) -> int:
        self._arrays.append(array(code, values))
        return self._arrays[-1].buffer_info()[0]

    def _lists(self, lists: Sequence[Iterable[int]]) -> _Lists:
        starts, items = [0], array("i")
        for values in lists:
            items.extend(values)
            starts.append(len(items))
        return _Lists(self._array("i", starts), self._array("i", items))
