"""Memory of optimizers: the state that they keep between steps, and the memory that is live while they step."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass


def state_bytes(optimizers: Iterable[Any]) -> dict[str, int]:
    """Return optimizer class -> bytes of state on this rank; empty without optimizers."""
    sums: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    for optimizer in optimizers:
        name = type(optimizer).__name__
        sums[name] += 0  # an optimizer without state is listed with 0 bytes
        for state in optimizer.state.values():
            for tensor in plain_tensors(pytree.tree_leaves(state)):
                storage = tensor.untyped_storage()
                if storage._cdata not in seen:
                    seen.add(storage._cdata)
                    sums[name] += storage.nbytes()
    return dict(sums)


def plain_tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among `values`, with DTensors and other wrapper tensors replaced by the tensors inside them.

    Those without storage are left out, such as sparse ones.
    """
    for value in values:
        if is_traceable_wrapper_subclass(value):
            yield from plain_tensors(getattr(value, name) for name in value.__tensor_flatten__()[0])
        elif isinstance(value, Tensor) and value.layout == torch.strided:
            yield value


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live storages, those given to `note` and those that ops make meanwhile, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._bytes = 0
        self._known: set[int] = set()

    def note(self, values: Iterable[Any]) -> None:
        """Count the storages of the tensors among `values`, each once."""
        for tensor in plain_tensors(values):
            storage = tensor.untyped_storage()
            key, size = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known.add(key)
                self._bytes += size
                weakref.finalize(storage, self._free, key, size).atexit = False
        self.peak_bytes = max(self.peak_bytes, self._bytes)

    def _free(self, key: int, size: int) -> None:
        self._known.discard(key)
        self._bytes -= size

    def __torch_dispatch__(
        self, func: OpOverload, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.note(pytree.tree_leaves(result))
        return result
