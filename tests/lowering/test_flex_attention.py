"""On a CPU, flex attention is a call of torch's op in forward and backward, and counted as a fallback."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.functional import scaled_dot_product_attention

import overlapc
from overlapc.runtime.counters import counted

LENGTH = 128


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_a_step_with_a_block_mask_equals_causal_attention(kv_heads, monkeypatch):
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)  # torch refuses gradients on CPUs
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, heads, LENGTH, 16, requires_grad=True) for heads in (4, kv_heads, kv_heads))
    bias = torch.randn(4, requires_grad=True)  # the same for all keys of a head, so softmax cancels it
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, LENGTH, LENGTH, device="cpu")

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        biased = lambda score, b, h, i, j: score + bias[h]  # noqa: E731
        return flex.flex_attention(q * 2, k, v, score_mod=biased, block_mask=mask, enable_gqa=kv_heads != 4).relu()

    expected = scaled_dot_product_attention(q * 2, k, v, is_causal=True, enable_gqa=kv_heads != 4).relu()
    wanted = torch.autograd.grad(expected.square().sum(), (q, k, v))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    result = torch.compile(attend, backend="overlapc", fullgraph=True)(q, k, v)
    torch.testing.assert_close(result, expected)
    for gradient, want in zip(torch.autograd.grad(result.square().sum(), (q, k, v)), wanted, strict=True):
        torch.testing.assert_close(gradient, want, rtol=1e-4, atol=1e-4)
    assert counted("fallback flex_attention") == counted("fallback flex_attention_backward") == 1
    assert not any(graph.unknown for graph in overlapc.report().steps[0].graphs)
