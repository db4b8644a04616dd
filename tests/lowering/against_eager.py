"""Compare a compiled call with eager: results, and arguments after the call, must be equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compiled(function: Callable[..., Any], dynamic: bool | None = False, **options: Any) -> Callable[..., Any]:
    """Compile `function` as one graph, discarding everything that Dynamo compiled before."""
    torch._dynamo.reset()
    return torch.compile(function, backend="overlapc", dynamic=dynamic, fullgraph=True, options=options)


def same(function: Callable[..., Any], *args: Any, dynamic: bool | None = False, **tolerance: Any) -> None:
    """Assert that eager and compiled calls return equal results and leave equal values in their arguments."""
    expected_args, found_args = ([copy(arg) for arg in args] for _ in range(2))
    expected = function(*expected_args)
    found = compiled(function, dynamic)(*found_args)
    torch.testing.assert_close(found, expected, equal_nan=True, check_stride=False, **tolerance)
    torch.testing.assert_close(found_args, expected_args, equal_nan=True, **tolerance)


def copy(value: Any) -> Any:
    """Return a copy of a tensor with the same strides; return other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    span = sum((extent - 1) * step for extent, step in zip(value.shape, value.stride(), strict=True)) + 1
    if not value.numel():
        return value.detach().clone()
    whole = value.detach().as_strided((span,), (1,), value.storage_offset()).clone()
    return whole.as_strided(value.shape, value.stride())
