"""Checks, while a compiled graph runs, that memory comes and goes as its program says (`check_lifecycle=True`).

The wrapper then reports every allocation, every result, every take-over and every free. A buffer whose storage has
another size than planned, that survives its free (somebody else holds it), that is gone before it, or that is never
freed is an error with the buffer's name.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from overlapc.errors import OverlapcError


class LifecycleError(OverlapcError):
    """Memory of a compiled graph did not live as planned."""


@dataclass
class _Live:
    storage: StorageWeakRef
    key: int  # of the storage: views of one have the same
    bytes: int  # 0 for a second name of a storage


class Lifecycle:
    """One run of one graph. Sizes are bytes of storages."""

    def __init__(self, graph: str, inputs: Iterable[object]) -> None:
        self.graph = graph
        self.peak_bytes = 0
        self._bytes = 0
        self._live: dict[str, _Live] = {}
        self._freed: set[str] = set()
        self._given = {_key(each) for each in inputs if isinstance(each, Tensor)}  # the caller's: may outlive us

    def allocated(self, name: str, tensor: Tensor, planned_bytes: int) -> None:
        """`name` is new memory of this size."""
        storage = tensor.untyped_storage()
        if storage.nbytes() != planned_bytes:
            raise self._error(name, f"has {storage.nbytes()} bytes, but {planned_bytes} were planned")
        self._add(name, tensor)

    def arrived(self, name: str, value: object) -> None:
        """`name` is what a call returned; it may share memory with what was there before."""
        if isinstance(value, Tensor) and value.layout == torch.strided and value.device.type != "meta":
            self._add(name, value)

    def took_over(self, name: str, source: str, tensor: Tensor) -> None:
        """`name` is the memory of `source`, which is no name any more."""
        before = self._live.pop(source, None)
        if before is None or before.key != _key(tensor):
            raise self._error(name, f"was to take over the memory of {source}, which is not where it was")
        self._freed.add(source)
        self._live[name] = before

    def freed(self, names: Iterable[str]) -> None:
        """These names are dropped: their storages must be gone, unless another name or the caller has them."""
        for name in names:
            entry = self._live.pop(name, None)
            self._freed.add(name)
            if entry is None:  # an input, or no tensor
                continue
            others = [other for other in self._live.values() if other.key == entry.key]
            if others:
                others[0].bytes += entry.bytes
                continue
            self._bytes -= entry.bytes
            if entry.key not in self._given and not entry.storage.expired():
                raise self._error(name, "was freed by the plan, but something still holds its memory")

    def returned(self, names: Iterable[str]) -> None:
        """The graph ends with these names; all other memory must have been freed."""
        kept = {self._live[name].key for name in names if name in self._live} | self._given
        for name, entry in self._live.items():
            if entry.storage.expired():
                raise self._error(name, "is to be alive at the end, but its memory is gone")
            if entry.key not in kept:
                raise self._error(name, "was never freed, and is not returned")
        last_peak_bytes[self.graph] = self.peak_bytes

    def _add(self, name: str, tensor: Tensor) -> None:
        if name in self._live:
            raise self._error(name, "came to be twice")
        key = _key(tensor)
        new = key not in self._given and all(entry.key != key for entry in self._live.values())
        size = tensor.untyped_storage().nbytes() if new else 0
        self._live[name] = _Live(StorageWeakRef(tensor.untyped_storage()), key, size)
        self._bytes += size
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _error(self, name: str, what: str) -> LifecycleError:
        return LifecycleError(
            f"{self.graph}: {name} {what}\n"
            'hint: options={"dump": "program"} writes the plan (program.txt) and the wrapper that runs it'
        )


last_peak_bytes: dict[str, int] = {}
"""Most bytes that each graph's own buffers took at once in its last checked run, inputs not counted."""


def _key(tensor: object) -> int:
    assert isinstance(tensor, Tensor)
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)
