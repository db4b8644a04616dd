"""Gradients that go where a computed value equals another are eager's, in every precision."""

from __future__ import annotations

import pytest
import torch

from tests.comparisons import COMPARISONS, gradients_differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_gradients_through_comparisons_are_eagers(dtype: torch.dtype):
    problems = [problem for name in COMPARISONS if (problem := gradients_differ(name, dtype, "cpu"))]
    assert not problems, "\n".join(problems)
