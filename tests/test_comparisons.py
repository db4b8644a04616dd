"""Gradients that go where a computed value equals another are eager's, in every precision."""

from __future__ import annotations

import pytest
import torch

from tests.comparisons import COMPARISONS, gradients_differ

# One of each way to compare. float64 and float16 take the ways of float32 and bfloat16 through the compiler; that their
# functions have the same bits in every kernel is for tests/codegen/test_same_bits.py.
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
