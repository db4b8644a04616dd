"""Cumulative ops equal eager along any dim, and pointwise ops before and after them are in the same kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from tests.codegen.interpreted import triton_on_cpu
from tests.lowering.against_eager import compiled, same

NUMBERS = torch.tensor([[0.5, -1.0, -1.0, math.nan, 2.0, math.nan], [math.inf, 3.0, math.inf, -math.inf, 0.0, 1.0]])


def every_scan(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, ...]:
    largest, smallest = x.cummax(dim), x.cummin(dim)
    return x.cumsum(dim), x.cumprod(dim), largest.values, largest.indices, smallest.values, smallest.indices


@pytest.mark.parametrize("dim", [0, 1])
def test_scans_of_ties_infinities_and_nans_equal_eager(dim: int):
    same(lambda x: (*every_scan(x, dim), x.logcumsumexp(dim)), NUMBERS)


@pytest.mark.parametrize("shape", [(3, 20), (2, 700), (70, 6)], ids=str)
def test_the_last_zero_gives_a_cumulative_extreme_its_sign(shape: tuple[int, ...]):
    numbers = torch.tensor([0.0, -0.0, 1.0, -1.0])
    x = torch.stack([numbers[torch.randint(kinds, shape)] for kinds in (2, 3, 4)])
    x = torch.cat([x, -x])
    for dim in (1, 2):
        same(lambda x: [x.cummax(dim), x.cummin(dim), 1 / x.cummax(dim).values, 1 / x.cummin(dim).values], x)  # noqa: B023


@pytest.mark.parametrize("dim", [0, -1])
@pytest.mark.parametrize("layout", ["rows", "columns", "holes"])
def test_scans_of_any_layout_equal_eager(dim: int, layout: str):
    x = torch.randn(7, 40)
    x = {"rows": x, "columns": x.t(), "holes": x[:, ::3]}[layout]
    same(lambda x: every_scan(x, dim), x)


def test_a_scan_of_a_middle_dim_equals_eager():
    same(lambda x: every_scan(x, 1), torch.randn(3, 5, 33))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool])
def test_scans_of_integers_are_exact(dtype: torch.dtype):
    x = (torch.arange(60).reshape(4, 15) * 7 % 5 - 1).to(dtype)
    same(lambda x: every_scan(x, 1), x)
    if dtype is not torch.bool:
        same(lambda x: (x.cumsum(1, dtype=dtype), x.cumprod(1, dtype=dtype)), x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scans_in_low_precision_accumulate_in_float32(dtype: torch.dtype):
    same(lambda x: (*every_scan(x, 1), x.logcumsumexp(1)), torch.rand(3, 300).to(dtype))


@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 1), (3, 0)])
def test_scans_of_tiny_and_empty_tensors_equal_eager(shape: tuple[int, ...]):
    same(lambda x: (*every_scan(x, -1), x.logcumsumexp(-1)), torch.randn(shape))


def test_one_compilation_scans_all_sizes():
    function = compiled(lambda x: (x.exp().cumsum(1), x.cummax(0)), dynamic=True)
    for rows, width in ((3, 17), (6, 4), (2, 3000)):
        x = torch.randn(rows, width)
        torch.testing.assert_close(function(x), (x.exp().cumsum(1), x.cummax(0)))


@pytest.mark.parametrize(
    ("function", "kernels"),
    [
        (lambda x: (x * 2).sigmoid().cumsum(1).add(1).tanh(), 1),  # pointwise ops before and after
        (lambda x: x.softmax(1).cumsum(1) < 0.9, 1),  # after reductions of the same rows
        (lambda x: x.cummax(1), 1),  # values and positions
        (lambda x: x.cumsum(1).amax(1), 1),  # before a reduction of the same rows
        (lambda x: x.cumsum(1).cumprod(1), 1),
        (lambda x: x.cumsum(1)[:, -1] + 1, 2),  # read at another place than it is written
        (lambda x: x.cumsum(1) + x.cumsum(0), 2),  # along different dims
    ],
)
def test_scans_fuse_with_ops_of_the_same_rows(function: Callable[[torch.Tensor], object], kernels: int):
    x = torch.randn(5, 48)
    counters.clear()
    torch.testing.assert_close(compiled(function)(x), function(x))
    assert counters["overlapc"]["kernels"] == kernels
    assert counters["overlapc"]["fallbacks"] == 0


def test_a_short_scan_is_not_unrolled_as_a_short_sum_is():
    same(lambda x: x.cumsum(1).sum(1), torch.randn(10, 4))


def test_gradients_of_scans_equal_eager():
    x = torch.randn(4, 30, requires_grad=True)
    weight = torch.randn(4, 30)
    for function in (lambda x: x.cumsum(1), lambda x: x.logcumsumexp(1), lambda x: x.cummax(1).values):
        (expected,) = torch.autograd.grad((function(x) * weight).sum(), x)
        (found,) = torch.autograd.grad((compiled(function)(x) * weight).sum(), x)
        torch.testing.assert_close(found, expected)


def test_a_long_row_is_scanned_by_several_programs_on_a_gpu(cache: Path):
    """In Triton, one row takes three kernels: its softmax, then a scan of the result in pieces."""

    def top_p(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mass = logits.softmax(-1).cumsum(-1)
        return mass, torch.where(mass < 0.9, logits, -torch.inf)

    x = torch.randn(1, 40_000).mul(3).sort(descending=True).values
    with triton_on_cpu():
        mass, kept = compiled(top_p, cache_dir=str(cache), profile="cpu-gloo")(x)
    torch.testing.assert_close(mass, x.double().softmax(-1).cumsum(-1).float())
    assert torch.equal(kept, torch.where(mass < 0.9, x, -torch.inf))
    (source,) = [text for path in cache.rglob("*.py") if "ops.scan_sum" in (text := path.read_text())]
    assert "# split: " in source
