"""A kernel's body with inputs and eager torch's results, and a run that detects writes outside of its buffers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from overlapc.codegen.generators import KernelSource
from overlapc.ir.body import Body
from tests.codegen.terms import bf16, boolean, f16

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A body, tensors for all its buffers (outputs with their previous content), and the expected outputs."""

    name: str
    body: Body
    tensors: Tensors
    expected: Callable[[Tensors], Tensors]
    sizes: Mapping[str, int] = field(default_factory=dict)
    tolerance: float = 2e-5  # relative to the largest expected magnitude, plus rounding of the output's dtype

    def run(self, launcher: Callable[..., None], source: KernelSource, device: str) -> list[str]:
        """Launch the kernel on copies of the tensors; return one line per wrong output and per write past an end."""
        guarded = {name: Guarded(tensor, device) for name, tensor in self.tensors.items()}
        expected = self.expected({name: tensor.to(device) for name, tensor in self.tensors.items()})
        sizes = [self.sizes[str(symbol)] for symbol in source.sizes]
        launcher(*(guarded[buffer].tensor for buffer in source.buffers), *sizes)
        problems = {name: self.problem(name, guarded[name].tensor, want, guarded) for name, want in expected.items()}
        found = [f"{name}: {problem}" for name, problem in problems.items() if problem]
        return found + [f"{name}: written past its end" for name, guard in guarded.items() if not guard.whole()]

    def problem(self, name: str, got: torch.Tensor, want: torch.Tensor, inputs: Mapping[str, Guarded]) -> str:
        """Return how an output differs from the expected one, or ""."""
        return difference(got, want, self.tolerance)


class Guarded:
    """A copy of a tensor with guard memory behind it: NaN (77 for integers), so that reads and writes there show."""

    def __init__(self, tensor: torch.Tensor, device: str) -> None:
        marker = math.nan if tensor.dtype.is_floating_point else 1 if tensor.dtype is boolean else 77
        memory = torch.full((tensor.numel() + 4096,), marker, dtype=tensor.dtype, device=device)
        self.tensor = memory[: tensor.numel()].view(tensor.shape)
        self.tensor.copy_(tensor)
        self._behind = memory[tensor.numel() :]
        self._before = self._behind.clone()

    def whole(self) -> bool:
        """Whether nothing was written past the tensor's end."""
        bits = self._behind.view(torch.uint8)
        return torch.equal(bits, self._before.view(torch.uint8))


def difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    """Return how `got` differs from `want`, or ""."""
    want = want.to(got.dtype).reshape(got.shape)
    if not got.dtype.is_floating_point:
        wrong = got != want
        detail = ""
    else:
        # One step of the dtype: results that are equal up to rounding may be rounded to different neighbours.
        eps = {bf16: 2**-7, f16: 2**-10}.get(got.dtype, 0.0)
        left, right = got.double(), want.double()
        finite = right[right.isfinite()]
        scale = float(finite.abs().max()) if finite.numel() else 1.0
        near = (left - right).abs() <= tolerance * scale + eps * right.abs()
        wrong = ~(near | (left == right) | (left.isnan() & right.isnan()))
        detail = f", largest error {float((left - right).abs().nan_to_num().max()):.3g} at scale {scale:.3g}"
    if not wrong.any():
        return ""
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{int(wrong.sum())} of {wrong.numel()} differ; at {at} got {got[at].item()}, want {want[at].item()}{detail}"
