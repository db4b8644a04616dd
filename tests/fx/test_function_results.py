"""An `autograd.Function` whose forward changes its result in place: its own backward gets the gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


class Quantized(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(x)
        return x.div(scale).round_().mul_(scale)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 2), None


class TwoResults(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp().neg_(), x.clone().clamp_(min=0)

    @staticmethod
    def backward(ctx: Any, first: Tensor, second: Tensor) -> Tensor:
        return 2 * first + 3 * second


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradients_are_those_of_eager(checkpointed: bool) -> None:
    def function(x: Tensor) -> Tensor:
        first, second = TwoResults.apply(Quantized.apply(x, 0.25))
        return first.sum() + (second * x).sum()

    def called(x: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False) if checkpointed else function(x)

    x = torch.linspace(-3, 3, 24)
    found, expected = (
        torch.autograd.grad(each(leaf := x.clone().requires_grad_()), leaf)[0]
        for each in (torch.compile(called, backend="overlapc"), called)
    )
    torch.testing.assert_close(found, expected)
    assert expected.abs().max() > 1
