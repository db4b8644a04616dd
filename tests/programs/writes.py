"""Reject in-place writes whose result torch leaves undefined, while a program is drawn.

A defined in-place op writes each element of memory once, and reads elements that it writes only at the same index. With
`as_strided` a program can violate this (`x.as_strided((3, 2), (1, 1)).add_(1)` adds twice to an element), and eager's
result then depends on its vectorization. torch itself rejects only simple cases (`expand`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class UndefinedWrite(RuntimeError):
    """An in-place op writes an element twice, or reads it at another index than it writes it."""


class DefinedWrites(TorchDispatchMode):
    """A dispatch mode that raises UndefinedWrite for undefined in-place writes."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable and isinstance(args[0], Tensor):
            check_write(args[0], [x for x in tree_leaves((args[1:], kwargs)) if isinstance(x, Tensor)])
        return func(*args, **kwargs)


def check_write(written: Tensor, read: list[Tensor]) -> None:
    at = positions(written)
    if at.unique().numel() < at.numel():
        raise UndefinedWrite("an element is written twice")
    for x in read:
        if x.untyped_storage().data_ptr() != written.untyped_storage().data_ptr() or not at.numel():
            continue
        others = positions(x)
        broadcasts = len(others.shape) <= at.ndim and all(
            a in (1, b) for a, b in zip(reversed(others.shape), reversed(at.shape), strict=False)
        )
        if torch.isin(others, at).any() and not (broadcasts and torch.equal(others.expand_as(at), at)):
            raise UndefinedWrite("an element is read at another index than it is written at")


def positions(x: Tensor) -> Tensor:
    """Return the byte offset of each element in its storage."""
    at = torch.tensor(x.storage_offset())
    for n, stride in zip(x.shape, x.stride(), strict=True):
        at = at[..., None] + torch.arange(n) * stride
    return at * x.element_size()
