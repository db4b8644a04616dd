"""Writes whose result torch leaves open, refused while a program is drawn.

An in-place op writes each element of memory once, and reads what it writes only at the same index. Through
`as_strided` a program can ask for more (`x.as_strided((3, 2), (1, 1)).add_(1)` adds twice to an element), and eager
then gives what its vectors happen to do. torch itself refuses only what it sees at a glance (`expand`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class UndefinedWrite(RuntimeError):
    """An element is written twice, or read at another index while it is written."""


class DefinedWrites(TorchDispatchMode):
    """A dispatch mode that raises `UndefinedWrite`."""

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
    """The byte at which each element lies in its memory."""
    at = torch.tensor(x.storage_offset())
    for n, stride in zip(x.shape, x.stride(), strict=True):
        at = at[..., None] + torch.arange(n) * stride
    return at * x.element_size()
