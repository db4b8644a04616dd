"""Arguments of a graph whose memory does not hold their numbers: zeros without memory, and numbers to be negated.

Autograd hands both to backward, whose kernels read memory.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor


class Negated(torch.autograd.Function):
    """The identity, with a gradient that is negated when it is read."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return torch._neg_view(gradient.clone())


def function(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin() * 2, x.cos()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("wrapper", ["python", "fx"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_gradients_from_eager_code_are_read_as_numbers(wrapper: str, dynamic: bool) -> None:
    options = {"wrapper": wrapper, "check_lifecycle": wrapper == "python"}
    compiled = torch.compile(function, backend="overlapc", dynamic=dynamic, options=options)
    for last in (torch.sgn, Negated.apply, torch.sgn, torch.neg):
        found = []
        for each in (function, compiled):
            x = torch.linspace(-3, 3, 12, requires_grad=True)
            sine, cosine = each(x)
            found.append(torch.autograd.grad((last(sine), last(cosine)), x, (torch.ones(12), torch.arange(12.0))))
        torch.testing.assert_close(*found)


@pytest.mark.usefixtures("fresh_dynamo")
def test_arguments_without_memory_are_zeros() -> None:
    compiled = torch.compile(lambda x: x * 2 + 1, backend="overlapc", dynamic=False)
    for x in (torch.ones(5), torch._efficientzerotensor((5,)), torch._neg_view(torch.ones(5)), torch.ones(5)):
        torch.testing.assert_close(compiled(x), x * 2 + 1)
