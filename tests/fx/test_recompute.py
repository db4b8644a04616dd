"""Values that backward recomputes so that forward need not save them."""

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


def contrastive(logits: Tensor) -> Tensor:
    logits = logits.float() * 0.5
    places = torch.arange(logits.shape[0])
    return F.cross_entropy(logits[:, : logits.shape[0]], places) + F.cross_entropy(logits.t(), places.repeat(20))


@pytest.mark.parametrize(("function", "rows"), [(cross_entropy, 8), (attention_weights, 8), (contrastive, 8 + 160)])
def test_float32_rows_are_recomputed_from_bfloat16(function: Callable[[Tensor], Tensor], rows: int) -> None:
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
    assert sum(tensor.numel() for tensor in wide) <= 3 * rows
    tangent = torch.randn_like(result)
    result.backward(tangent)
    function(reference).backward(tangent.double())
    assert x.grad is not None
    assert reference.grad is not None
    torch.testing.assert_close(x.grad.double(), reference.grad, rtol=1e-2, atol=1e-4)


def test_every_other_sum_of_gated_residuals_is_recomputed() -> None:
    """Backward needs the products for the gates' gradients; it recomputes a sum from the previous sum and a product."""
    torch.manual_seed(0)
    width = 32
    weights = [torch.randn(width, width).div(width**0.5).requires_grad_() for _ in range(4)]
    gates = [torch.randn(width, requires_grad=True) for _ in range(4)]

    def model(x: Tensor, gates: list[Tensor], weights: list[Tensor]) -> Tensor:
        for gate, weight in zip(gates, weights, strict=True):
            x = x + gate * (x.sin() @ weight)
        return x.cos()

    x = torch.randn(64, width, requires_grad=True)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        result = torch.compile(model, backend=overlapc, dynamic=False)(x, gates, weights)
    assert sum(each.shape == x.shape for each in saved) == 1 + 4 + 4 + 2  # x, products, their factors; two sums
    result.sum().backward()
    inputs = (x, *gates, *weights)
    wanted = torch.autograd.grad(model(x, gates, weights).sum(), inputs)
    torch.testing.assert_close([each.grad for each in inputs], list(wanted))


def test_saved_tensors_share_no_memory() -> None:
    """A tensor of which backward reads three views is saved once, so that plans do not count its memory three times."""
    product = torch.nn.Linear(16, 48)
    saved: list[Tensor] = []

    def attend(x: Tensor) -> Tensor:
        query, key, value = product(x).view(2, 8, 3, 2, 8).permute(2, 0, 3, 1, 4).unbind(0)
        return F.scaled_dot_product_attention(query, key, value).sum()

    x = torch.randn(2, 8, 16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda each: saved.append(each) or each, lambda each: each):
        torch.compile(attend, backend=overlapc, dynamic=False)(x)
    memories = [each.untyped_storage().data_ptr() for each in saved]
    assert len(set(memories)) == len(memories)


def test_halves_of_a_sum_are_recomputed_from_the_summands() -> None:
    """Forward saves only its inputs: the sum would be as large, and forward would have to store it."""
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
