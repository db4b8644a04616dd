"""Check, while a graph runs, that memory is allocated, used and freed as its program says (`check_lifecycle=True`).

The wrapper then reports every allocation, launch, collective, wait, take-over and free. It is an error, which names the
buffer, if

* a storage has another size than planned, is still held by something after its free, is freed before that, or is never
  freed;
* something wrote past the end of a buffer: memory that the graph allocates is followed by a few guard bytes;
* a buffer is written, freed or taken over while a collective in flight still reads it, or used before its result has
  arrived.

New and freed memory is filled with NaN, which appears in results if a graph, or a collective, reads that memory.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from overlapc.errors import OverlapcError

_GUARD_BYTES = 64  # after each buffer; a multiple of every element's size
_GUARD = 0xC5
_POISON = 0xFF  # NaN in every floating-point dtype, -1 in the integers
_RELEASE_TIMEOUT_S = 30.0  # a transport may hold a tensor for this long after its wait; longer is an error


class LifecycleError(OverlapcError):
    """Memory of a compiled graph was not allocated, used or freed as planned."""


@dataclass
class _Live:
    storage: StorageWeakRef
    key: int  # of the storage; equal for all views of it
    bytes: int  # 0 for a second name of a storage
    place: tuple[int, int]  # addresses of the first byte and past the last
    ours: bool = False  # memory that must not be held outside of the graph
    carved: bool = False  # a part of a pool; other names have other parts
    successor: str = ""  # the name that takes over this part of a pool


@dataclass
class _Flight:
    """A collective in flight: the memory that it reads, and the memory that it writes until each result's wait."""

    name: str
    reads: list[tuple[str, tuple[int, int]]]
    writes: dict[str, tuple[int, int]]


class Lifecycle:
    """The checks of one run of one graph. Sizes are bytes of storages."""

    def __init__(self, graph: str, inputs: Iterable[object]) -> None:
        self.graph = graph
        self.peak_bytes = 0
        self._bytes = 0
        self._live: dict[str, _Live] = {}
        self._freed: set[str] = set()
        # The caller's memory, which may outlive the run. Weak references prevent another storage from getting a key.
        self._given = {_key(each): _weak(each) for each in inputs if isinstance(each, Tensor)}
        self._guarded: dict[int, int] = {}  # key -> bytes before the guard
        self._flights: list[_Flight] = []

    # --- memory that begins to be used

    def allocate(
        self,
        name: str,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | str,
        planned_bytes: int,
    ) -> Tensor:
        """Return new memory for `name`, filled with NaN and followed by a guard."""
        flat = torch.full((planned_bytes + _GUARD_BYTES,), _POISON, dtype=torch.uint8, device=device)
        flat[planned_bytes:] = _GUARD
        tensor = torch._C._dynamo.guards._reinterpret_tensor(flat.view(dtype), size, stride, 0)  # type: ignore[attr-defined]
        assert isinstance(tensor, Tensor)
        self._guarded[_key(tensor)] = planned_bytes
        self._add(name, tensor).ours = True
        return tensor

    def allocated(self, name: str, tensor: Tensor, planned_bytes: int) -> None:
        """Note that `name` is new memory of this size."""
        storage = tensor.untyped_storage()
        if storage.nbytes() != planned_bytes:
            raise self._error(name, f"has {storage.nbytes()} bytes, but {planned_bytes} were planned")
        self._add(name, tensor).ours = True

    def carved(self, name: str, tensor: Tensor) -> None:
        """Note that `name` is a part of a pool, either unused or taken over from a name that is freed next."""
        place = _place(tensor)
        for other, entry in self._live.items():
            if entry.carved and _overlap(entry.place, place):
                if entry.successor or entry.place[0] != place[0]:
                    raise self._error(name, f"is placed in pool memory that {other} still uses")
                entry.successor = name
        self._not_in_flight(name, place, "is placed in pool memory")
        entry = self._add(name, tensor)
        entry.ours = entry.carved = True

    def arrived(self, name: str, value: object) -> None:
        """Note that a call returned `name`, which may share memory with earlier buffers."""
        if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta":
            self._add(name, value)

    def laid_out(self, name: str, value: object) -> None:
        """Note that `name` now has its traced strides, perhaps as a copy of what the call returned."""
        if name in self._live and self._live[name].key != _key(value):
            self.freed([name])
            self.arrived(name, value)

    def lent(self, values: Mapping[str, object]) -> None:
        """Note that these lie in memory that is held outside of the graph."""
        for name, value in values.items():
            if isinstance(value, Tensor):
                self._given.setdefault(_key(value), _weak(value))
                self._add(name, value)

    def reused(self, name: str, tensor: Tensor) -> None:
        """Note that `name` is new memory, or that of an argument that only this graph holds."""
        self._not_in_flight(name, _place(tensor), "takes memory over")
        self._add(name, tensor)

    def took_over(self, name: str, source: str, tensor: Tensor) -> None:
        """Note that `name` takes over the memory of `source`, and that the name `source` ends."""
        before = self._live.pop(source, None)
        if before is None or before.key != _key(tensor):
            raise self._error(name, f"was to take over the memory of {source}, which is gone or has moved")
        self._not_in_flight(name, _place(tensor), f"takes over the memory of {source}")
        self._freed.add(source)
        self._live[name] = before
        before.place = _place(tensor)

    # --- use of memory

    def runs(self, node: str, touched: Mapping[str, object], written: Iterable[str]) -> None:
        """Check, before a kernel or call, the values `touched` that it uses and those of them that it writes."""
        places = {name: _place(value) for name, value in touched.items() if _has_memory(value)}
        written = set(written)
        for name, entry in self._live.items():
            if entry.successor:
                raise self._error(entry.successor, f"is placed in pool memory that {name} still uses")
        for flight in self._flights:
            for name, place in places.items():
                if any(_overlap(place, other) for other in flight.writes.values()):
                    raise self._error(name, f"is used by {node} before {flight.name} has arrived in it")
                if name in written and any(_overlap(place, other) for _, other in flight.reads):
                    raise self._error(name, f"is written by {node} while {flight.name} still reads it")

    def ran(self, node: str, written: Mapping[str, object]) -> None:
        """Check the guards of what a kernel or call has written."""
        for name, value in written.items():
            if isinstance(value, Tensor) and _has_memory(value):
                self._check_guard(name, value, f" by {node}, or by something that ran at the same time")

    def started(
        self, node: str, given: Mapping[str, object], results: Mapping[str, object], waited: Iterable[str]
    ) -> None:
        """Note the start of a collective that reads `given` and writes `results`, or `given` in place.

        waited: the names that the graph waits for.
        """
        tensors = {name: value for name, value in (*given.items(), *results.items()) if _has_memory(value)}
        writes = {name: _place(tensors[name]) for name in waited if name in tensors}
        if writes:
            reads = [(name, _place(value)) for name, value in given.items() if _has_memory(value)]
            # A tensor that is reduced in place is read and written: the graph waits for it like for any result.
            reads = [(name, place) for name, place in reads if not any(_overlap(place, to) for to in writes.values())]
            self._flights.append(_Flight(node, reads, writes))

    def waited(self, name: str, tensor: object) -> None:
        """Note that the collective that fills `name` is done."""
        if not _has_memory(tensor):
            return
        for flight in self._flights:
            flight.writes.pop(name, None)
        self._flights = [flight for flight in self._flights if flight.writes]
        if name in self._live and _key(tensor) not in self._given:
            self._live[name].ours = True

    # --- memory that is freed

    def freeing(self, values: Mapping[str, object]) -> None:
        """Check these names before they are dropped; fill memory that only the graph holds with NaN."""
        for name, tensor in values.items():
            entry = self._live.get(name)
            if entry is None or not isinstance(tensor, Tensor):
                continue
            shared = any(other.key == entry.key for key, other in self._live.items() if key not in values)
            if shared and not entry.carved:
                continue
            if entry.key not in self._given:
                self._not_in_flight(name, entry.place, "is freed")
            self._check_guard(name, tensor, "")
            if entry.ours and entry.key not in self._given and not entry.successor:
                _bytes_of(tensor, entry.carved).fill_(_POISON)

    def freed(self, names: Iterable[str]) -> None:
        """Check, after these names were dropped, that storages are freed unless another name or the caller has them."""
        for name in names:
            entry = self._live.pop(name, None)
            self._freed.add(name)
            if entry is None:  # an input, or not a tensor
                continue
            others = [other for other in self._live.values() if other.key == entry.key]
            if others:
                others[0].bytes += entry.bytes
                continue
            self._bytes -= entry.bytes
            if entry.key in self._given:
                continue
            if not _is_freed(entry.storage):
                raise self._error(name, "was freed by the plan, but something still holds its memory")
            self._guarded.pop(entry.key, None)  # another storage may get this key

    def returned(self, values: Mapping[str, object]) -> None:
        """Check at the end of the graph, which returns `values`: all other memory must have been freed."""
        kept = {self._live[name].key for name in values if name in self._live} | self._given.keys()
        for name, entry in self._live.items():
            if entry.storage.expired():
                raise self._error(name, "must be alive at the end, but its memory is freed")
            if entry.key not in kept:
                raise self._error(name, "was never freed, and is not returned")
        for name, value in values.items():
            if isinstance(value, Tensor) and _has_memory(value):
                self._check_guard(name, value, "")
        last_peak_bytes[self.graph] = self.peak_bytes

    # --- helpers

    def _add(self, name: str, tensor: Tensor) -> _Live:
        if name in self._live:
            raise self._error(name, "was created twice")
        key = _key(tensor)
        new = key not in self._given and all(entry.key != key for entry in self._live.values())
        size = self._guarded.get(key, tensor.untyped_storage().nbytes()) if new else 0
        entry = self._live[name] = _Live(StorageWeakRef(tensor.untyped_storage()), key, size, _place(tensor))
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)
        return entry

    def _check_guard(self, name: str, tensor: Tensor, by: str) -> None:
        planned_bytes = self._guarded.get(_key(tensor))
        if planned_bytes is None:
            return
        guard = _bytes_of(tensor, False)[planned_bytes:]
        if not bool((guard == _GUARD).all()):
            at = int((guard != _GUARD).nonzero()[0])
            raise self._error(name, f"was written {at} bytes past its end{by}; it has {planned_bytes} bytes")

    def _not_in_flight(self, name: str, place: tuple[int, int], what: str) -> None:
        for flight in self._flights:
            for other, there in (*flight.reads, *flight.writes.items()):
                if _overlap(place, there):
                    raise self._error(name, f"{what} while {flight.name}, in flight, still uses it as {other}")

    def _error(self, name: str, what: str) -> LifecycleError:
        return LifecycleError(
            f"{self.graph}: {name} {what}\n"
            'hint: options={"dump": "program"} writes the plan (program.txt) and the wrapper that runs it'
        )


last_peak_bytes: dict[str, int] = {}
"""By graph: the peak memory of its own buffers in its last checked run, in bytes, without inputs."""


def _key(tensor: object) -> int:
    assert isinstance(tensor, Tensor)
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _weak(tensor: Tensor) -> StorageWeakRef | None:
    return StorageWeakRef(tensor.untyped_storage()) if tensor.layout == torch.strided else None


def _is_freed(storage: StorageWeakRef) -> bool:
    """Whether a storage has no owner left.

    gloo's worker ends the wait for a collective before it releases the collective's tensors, so it may be their last
    owner for a moment, whichever call launched the collective.
    """
    ends = time.monotonic() + _RELEASE_TIMEOUT_S
    while not storage.expired():
        if time.monotonic() > ends:
            return False
        time.sleep(1e-4)
    return True


def _has_memory(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta"


def _place(tensor: object) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and past its last; (0, 0) for a tensor without elements."""
    assert isinstance(tensor, Tensor)
    if not _has_memory(tensor) or tensor.numel() == 0:
        return (0, 0)
    last = sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = tensor.data_ptr()
    return first, first + (last + 1) * tensor.element_size()


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> bool:
    return a[0] < b[1] and b[0] < a[1]


def _bytes_of(tensor: Tensor, part: bool) -> Tensor:
    """Return a tensor's whole storage as bytes or, with `part`, only the range that the tensor covers."""
    storage = tensor.untyped_storage()
    first, end = _place(tensor) if part else (storage.data_ptr(), storage.data_ptr() + storage.nbytes())
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, first - storage.data_ptr() if part else 0, (end - first,), (1,))
