"""`topk` of long rows by groups returns eager's elements and indices for any content, and searches fewer elements."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.fx.top_k import LONG_ROW, group_of, topk_of_groups
from tests.lowering.against_eager import compiled

LENGTH = 2 * LONG_ROW


def shuffled(*size: int) -> Tensor:
    """Return rows without equal elements, whose order would be undefined."""
    return torch.stack([torch.randperm(size[-1]) for _ in range(math.prod(size[:-1]))]).view(size).float() - 100


def same_choice(x: Tensor, k: int, largest: bool = True) -> None:
    """Assert that values equal eager's, and that indices are distinct and lead to these values."""
    values, places = topk_of_groups(x, k, -1, largest)
    torch.testing.assert_close(values, x.topk(k, -1, largest).values, equal_nan=True)
    torch.testing.assert_close(values, x.gather(-1, places), equal_nan=True)
    assert all(len(set(row.tolist())) == k for row in places.view(-1, k))


@settings(max_examples=20)
@given(st.integers(1, 3), st.integers(1, 60), st.sampled_from([16, 48, 64, 8 * 25]), st.booleans(), st.booleans())
def test_any_length_and_count_equal_eager(rows: int, k: int, step: int, largest: bool, ties: bool) -> None:
    length = -(-4 * LONG_ROW // step) * step
    if group_of(torch.empty(rows, length), k, -1) is None:
        return
    x = torch.randint(5, (rows, length)).float() if ties else shuffled(rows, length)
    same_choice(x, k, largest)


@pytest.mark.parametrize("filled", [math.inf, -math.inf, math.nan])
def test_rows_with_infinities_and_nans_equal_eager(filled: float) -> None:
    x = shuffled(2, LENGTH)
    x[0, 5:3000] = filled
    x[1] = filled
    same_choice(x, 9)


def test_compiled_topk_and_its_gradients_equal_eager() -> None:
    x = shuffled(2, 3, LENGTH).requires_grad_()

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        values, places = x.topk(8)
        return values.softmax(-1), places

    found, want = compiled(function)(x), function(x)
    torch.testing.assert_close(found[0], want[0])
    assert torch.equal(found[1], want[1])
    weights = torch.arange(8.0)
    gradients = [torch.autograd.grad((values * weights).sum(), x)[0] for values in (found[0], want[0])]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("largest", [True, False])
def test_a_nan_does_not_hide_other_elements_of_its_group(dtype: torch.dtype, largest: bool) -> None:
    x = torch.full((3, LENGTH), math.inf if largest else -math.inf, dtype=dtype)
    x[0] = math.nan
    x[0, 1:9] = torch.arange(8.0)  # the only numbers, in groups with NaNs
    x[1] = -x[1]
    x[1, :200] = math.nan
    x[2] = torch.arange(LENGTH) % 100
    x[2, 1::2] = math.nan
    same_choice(x, 12, largest)


def test_searches_are_over_less_than_a_sixteenth_of_the_row() -> None:
    graph = make_fx(lambda x: topk_of_groups(x, 50), tracing_mode="fake")(torch.empty(4, 128256)).graph
    searched = [
        node.args[0].meta["val"].shape[-1] for node in graph.nodes if node.target is torch.ops.aten.topk.default
    ]
    assert searched == [2004, 3200]


@pytest.mark.parametrize(
    ("x", "k", "dim"),
    [
        (torch.empty(3, LONG_ROW - 16), 4, -1),  # short rows
        (torch.empty(LENGTH, 3), 4, 0),  # not along the last dim
        (torch.empty(3, LENGTH + 1), 4, -1),  # not divisible into groups of equal size
        (torch.empty(3, LENGTH), 2000, -1),  # would search as many elements as without groups
        (torch.tensor(1.0), 1, -1),
    ],
)
def test_topk_that_groups_would_not_make_faster_is_not_decomposed(x: Tensor, k: int, dim: int) -> None:
    assert topk_of_groups(x, k, dim) is NotImplemented
