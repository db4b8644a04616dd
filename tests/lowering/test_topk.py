"""topk of short rows is computed by reductions: values, indices, NaN and infinities as in eager, ties by position."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.backend import overlapc
from overlapc.lowering import lower


def compiled(function):
    torch._dynamo.reset()
    counters["overlapc"].clear()
    return torch.compile(function, backend=overlapc, dynamic=False)


@pytest.mark.parametrize(("size", "dim", "k"), [((5, 24), -1, 6), ((3, 9, 4), 1, 3), ((17,), 0, 16)])
def test_values_and_indices_equal_eager(size: tuple[int, ...], dim: int, k: int) -> None:
    torch.manual_seed(0)
    count = math.prod(size)
    x = torch.randperm(count).view(size).float() - count / 2  # no ties, whose order torch leaves open
    values, places = compiled(lambda x: x.topk(k, dim))(x)
    want = x.topk(k, dim)
    assert torch.equal(values, want.values)
    assert torch.equal(places, want.indices)
    assert counters["overlapc"]["fallbacks"] == 0


def test_infinities_nan_and_ties_are_each_selected_once() -> None:
    inf, nan = math.inf, math.nan
    x = torch.tensor([[-inf, -inf, 1.0, -inf], [nan, inf, nan, 0.0], [2.0, 2.0, 2.0, 2.0]])
    values, places = compiled(lambda x: x.topk(3))(x)
    torch.testing.assert_close(values, x.topk(3).values, equal_nan=True)
    assert places.tolist() == [[2, 0, 1], [0, 2, 1], [0, 1, 2]]


def test_ops_that_read_the_selected_elements_equal_eager() -> None:
    torch.manual_seed(0)

    def router(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, chosen = x.softmax(-1).topk(4, -1)
        return weights / weights.sum(-1, keepdim=True), chosen, weights[:, 1] * 2

    x = torch.randn(33, 16)
    torch.testing.assert_close(compiled(router)(x), router(x))
    assert counters["overlapc"]["fallbacks"] == 0


@pytest.mark.parametrize("x", [torch.randn(3, 5000), torch.randn(3, 50, dtype=torch.float64)], ids=["long", "float64"])
def test_long_rows_and_float64_are_library_calls(x: Tensor) -> None:
    assert torch.equal(compiled(lambda x: x.topk(3).values)(x), x.topk(3).values)
    assert counters["overlapc"]["fallbacks"] == 1


def test_a_second_call_and_the_second_result_of_the_first_have_different_names() -> None:
    with FakeTensorMode():
        traced = make_fx(lambda x: (*x.topk(2, 0), *x.long().topk(2, 0)))(torch.empty(5))
    graph = lower(traced, "graph")
    names = [each.name for each in graph.ops]  # a kernel per result of the first topk, a cast, the call of the second
    assert len(names) == len(set(names)) == 4
