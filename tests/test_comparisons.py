"""Gradients that are routed by comparing computed values equal eager's, in every floating-point dtype."""

from __future__ import annotations

import pytest
import torch

from tests.comparisons import COMPARISONS, gradients_differ

# One function per kind of comparison. The compiler treats float64 like float32 and float16 like bfloat16, so these few
# suffice; tests/codegen/test_same_bits.py tests that their functions return the same bits in every kernel.
EACH_WAY = ("amax", "max and where", "top-k", "where", "maximum", "relu of what is below the top", "log-sum-exp")
CASES = {
    torch.float32: tuple(COMPARISONS),
    torch.bfloat16: tuple(COMPARISONS),
    torch.float64: EACH_WAY,
    torch.float16: EACH_WAY,
}


@pytest.mark.parametrize("dtype", CASES, ids=str)
def test_gradients_through_comparisons_are_eagers(dtype: torch.dtype):
    problems = [problem for name in CASES[dtype] if (problem := gradients_differ(name, dtype, "cpu"))]
    assert not problems, "\n".join(problems)
