"""Generated flex attention kernels on a real GPU, compared with float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import overlapc
from overlapc.runtime.counters import counted
from tests.codegen.flex_cases import CASES, FlexCase, check, errors

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
EACH = [pytest.param(case, dtype, id=f"{case.name}, {dtype}") for case in CASES for dtype in case.dtypes]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, backend="overlapc", fullgraph=True, dynamic=False)


@pytest.mark.parametrize(("case", "dtype"), EACH)
def test_forward_and_backward_are_as_exact_as_eager(case: FlexCase, dtype: torch.dtype):
    width = 128 if dtype is torch.bfloat16 else 64
    found = errors(case, compiled, "cuda", dtype, 768, width, 128)
    print(case.name, dtype, " ".join(f"{name} {ours:.1e}/{eager:.1e}" for name, (ours, eager) in found.items()))
    check(case, found, dtype)
    fallbacks = counted("fallback flex_attention"), counted("fallback flex_attention_backward")
    assert fallbacks == (0, 0), [graph.attention for graph in overlapc.report().steps[-1].graphs]
