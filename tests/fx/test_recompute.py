"""What backward computes again rather than forward saving it in float32."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapc.backend import overlapc


def cross_entropy(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.float(), torch.arange(logits.shape[0]) * 3)


def attention_weights(scores: Tensor) -> Tensor:
    return (scores.float() * 0.5).softmax(-1).to(scores.dtype)


@pytest.mark.parametrize("function", [cross_entropy, attention_weights])
def test_rows_are_computed_again_from_low_precision(function: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 160).bfloat16().requires_grad_()
    reference = x.detach().double().requires_grad_()
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = torch.compile(function, backend=overlapc, dynamic=False)(x)
    wide = [tensor for tensor in saved if tensor.dtype is torch.float32]
    assert sum(tensor.numel() for tensor in wide) <= 3 * x.shape[0]
    tangent = torch.randn_like(result)
    result.backward(tangent)
    function(reference).backward(tangent.double())
    assert x.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(x.grad.double(), reference.grad, rtol=1e-2, atol=1e-4)


def test_the_halves_of_a_sum_are_taken_again_from_what_was_added() -> None:
    """What forward saves is its inputs: the sum would be as large, and forward would write it."""
    product, bias = torch.randn(8, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    saved: list[Tensor] = []

    def gated(product: Tensor, bias: Tensor) -> Tensor:
        gate, up = (product + bias).chunk(2, -1)
        return F.silu(gate) * up

    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        result = torch.compile(gated, backend=overlapc, dynamic=False)(product, bias)
    assert {tensor.data_ptr() for tensor in saved} <= {product.data_ptr(), bias.data_ptr()}
    result.sum().backward()
    wanted = torch.autograd.grad(gated(product, bias).sum(), (product, bias))
    torch.testing.assert_close((product.grad, bias.grad), wanted)
