"""Memory that torch allocates within backward of attention, compared with the formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from overlapc.fusion.scratch import scratch_bytes
from tests.fusion.small_graphs import graph
from tests.fusion.test_scratch import MEASURED, ROUNDING, backward

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
aten = torch.ops.aten


def within(call: Any) -> int:
    """Return the bytes that `call` requests beyond those of its results."""
    call()  # the first call sets up libraries
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    stats = torch.cuda.memory_stats()
    kept = stats["requested_bytes.all.current"] - before
    del results
    return int(stats["requested_bytes.all.peak"]) - before - kept


def measured_bytes(kernel: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> int:
    batch, heads, key_heads, queries, keys, width = sizes
    q, grad = (torch.randn(batch, heads, queries, width, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(batch, key_heads, keys, width, device="cuda", dtype=dtype) for _ in range(2))
    causal = queries == keys
    if kernel == "flash":
        out, sums, *rest = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False)
        given = (out, sums, *rest[:4], 0.0, causal, *rest[4:6])
        return within(lambda: aten._scaled_dot_product_flash_attention_backward(grad, q, k, v, *given))
    if kernel == "efficient":
        found = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, causal)
        mask = [True, True, True, False]
        return within(
            lambda: aten._scaled_dot_product_efficient_attention_backward(
                grad, q, k, v, None, *found, 0.0, mask, causal
            )
        )
    out, sums, *rest = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False)
    given = (out, sums, *rest[4:6], None, *rest[:4], 0.0, causal)
    return within(lambda: aten._scaled_dot_product_cudnn_attention_backward(grad, q, k, v, *given))


@pytest.mark.parametrize(("kernel", "dtype", "sizes"), [row[:3] for row in MEASURED])
def test_backward_of_attention_takes_the_memory_of_the_formula(
    kernel: str, dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    call = backward(kernel, dtype, sizes)
    formula = scratch_bytes(call, graph([call], ["dq"]))
    assert measured_bytes(kernel, dtype, sizes) == pytest.approx(formula, abs=ROUNDING)
