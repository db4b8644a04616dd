"""Decompositions of torch's operators have the dtypes of the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapc.backend import overlapc

NORMS: dict[str, Callable[..., Tensor]] = {
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "layer_norm": lambda x, w, b: F.layer_norm(x.transpose(1, 2), (6,), w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x, torch.zeros(6), torch.ones(6), w, b, training=True),
}


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    given = [each.clone().requires_grad_() for each in inputs]
    result = function(*given)
    generator = torch.Generator().manual_seed(3)
    tangent = torch.randn(result.shape, generator=generator, dtype=torch.float64).bfloat16()
    return [result, *torch.autograd.grad(result, given, tangent.to(result.dtype))]


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_float32_parameters_with_bfloat16_inputs_are_not_rounded_to_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 6, 64).bfloat16(), torch.randn(6), torch.randn(6)
    true = gradients(NORMS[name], x.float(), w, b)
    torch._dynamo.reset()
    found = gradients(torch.compile(NORMS[name], backend=overlapc), x, w, b)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for of_parameter, expected in zip(found[2:], true[2:], strict=True):
        assert (of_parameter - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("op", ["native_layer_norm", "native_group_norm", "native_batch_norm"])
def test_norms_of_bfloat16_inputs_with_float32_parameters_return_float32_statistics(op: str) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 6, 8).bfloat16(), torch.randn(6), torch.randn(6)
    calls: dict[str, Callable[..., Any]] = {
        "native_layer_norm": lambda x: torch.native_layer_norm(x.transpose(1, 2), [6], w, b, 1e-5),
        "native_group_norm": lambda x: torch.native_group_norm(x, w, b, 4, 6, 8, 2, 1e-5),
        "native_batch_norm": lambda x: torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5),
    }
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(calls[op], backend=overlapc)(x), calls[op](x))
