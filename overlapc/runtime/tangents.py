"""Convert incoming gradients to the layout that a compiled backward expects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from overlapc.errors import OverlapcError


@dataclass(frozen=True, slots=True)
class Tangent:
    """The gradient of one output, in the layout that backward was compiled for."""

    output: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def fitted(self, given: Tensor | None) -> Tensor:
        """Return `given`, copied if it has another layout; zeros for None."""
        if given is None:
            return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device).zero_()
        given = _plain(given, self.output)
        if given.shape != self.size:
            raise OverlapcError(f"the gradient of output {self.output} has size {tuple(given.shape)}, not {self.size}")
        if given.stride() == self.stride and given.dtype == self.dtype:
            return given
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device).copy_(given)


@dataclass(frozen=True, slots=True)
class SizedTangent:
    """The gradient of an output of symbolic size: contiguous in a memory format."""

    output: int
    format: torch.memory_format
    dtype: torch.dtype
    stride: None = None  # differs from call to call

    def fitted(self, given: Tensor) -> Tensor:
        """Return `given`, copied if it is not contiguous."""
        return _plain(given, self.output).to(self.dtype).contiguous(memory_format=self.format)


def _plain(given: Any, output: int) -> Tensor:
    """Return `given` without a wrapper such as a collective in flight; raise OverlapcError for other subclasses."""
    if not is_traceable_wrapper_subclass(given):
        return given
    coerce = getattr(given, "__coerce_same_metadata_as_tangent__", None)
    plain = None if coerce is None else coerce(None, Tensor)
    if type(plain) is not Tensor:
        raise OverlapcError(
            f"the gradient of output {output} of a compiled step is a {type(given).__name__}, but the output is a plain"
            " tensor\nhint: give backward a plain tensor, such as the local part of a DTensor"
        )
    return plain
