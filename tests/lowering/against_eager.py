"""The same call in eager and compiled: results and what became of the arguments must be equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Any], dynamic: bool | None = False, **options: Any) -> Callable[..., Any]:
    """`function` compiled afresh, as one graph."""
    torch._dynamo.reset()
    return torch.compile(function, backend="overlapc", dynamic=dynamic, fullgraph=True, options=options)


def same(function: Callable[..., Any], *args: Any, dynamic: bool | None = False, **tolerance: Any) -> None:
    """AssertionError unless eager and compiled return the same and leave the same in their arguments."""
    expected_args, found_args = ([copy(arg) for arg in args] for _ in range(2))
    expected = function(*expected_args)
    found = compiled(function, dynamic)(*found_args)
    torch.testing.assert_close(found, expected, equal_nan=True, check_stride=False, **tolerance)
    torch.testing.assert_close(found_args, expected_args, equal_nan=True, **tolerance)


def copy(value: Any) -> Any:
    """A tensor with its own memory and the strides of `value`; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    span = sum((extent - 1) * step for extent, step in zip(value.shape, value.stride(), strict=True)) + 1
    if not value.numel():
        return value.detach().clone()
    whole = value.detach().as_strided((span,), (1,), value.storage_offset()).clone()
    return whole.as_strided(value.shape, value.stride())
