"""Pieces of a loop that read the same memory are joined into one loop, which reads and computes each value once."""

from __future__ import annotations

import pytest
import torch

from overlapc.ir.body import Body, Cast, Constant, Index, Load, Reduce, Store, Value, op
from tests.codegen.cpp_kernels import Kernels
from tests.codegen.terms import loop, p0, p1, r0, s0

F32, BF16 = torch.float32, torch.bfloat16
HEADS, WIDTH = 40, 64


def rotated(at, symbol, half: int, dtype: torch.dtype) -> tuple[Value, Value]:
    """Return exp(x), rounded to bfloat16, and the same with swapped halves: cat(-second, first)."""

    def made(index, mask=None) -> Value:
        return Cast(op("exp", Load("x", index, dtype, mask)), BF16)

    first, second = op("lt", Index(symbol), Index(half + 0 * symbol)), op("ge", Index(symbol), Index(half + 0 * symbol))
    turned = op("where", first, op("neg", made(at + half, first)), made(at - half, second))
    return made(at), turned


def rotary(width: int, half: int, dtype: torch.dtype = F32) -> Body:
    plain, turned = rotated(width * p0 + p1, p1, half, dtype)
    value = op("add", op("mul", plain, Load("cos", p1, F32)), op("mul", turned, Load("sin", p1, F32)))
    return Body((loop(p0, HEADS), loop(p1, width)), (), (Store("y", width * p0 + p1, value, dtype),))


def rotary_sum() -> Body:
    """Return a body for the row sums of a rotary embedding, and every element minus half of its row's sum."""
    plain, turned = rotated(WIDTH * p0 + r0, r0, WIDTH // 2, F32)
    value = op("add", plain, op("mul", turned, Load("sin", r0, F32)))
    total = Reduce("sum", value, F32)
    stores = (
        Store("total", p0, total, F32),
        Store("y", WIDTH * p0 + r0, op("sub", value, op("mul", total, Constant(0.5, F32))), F32),
    )
    return Body((loop(p0, HEADS),), (loop(r0, WIDTH),), stores)


def side_by_side_in_memory() -> Body:
    """Return a body that reads the halves of a row from two buffers, so that they share no load."""
    first = op("lt", Index(p1), Index(32 + 0 * p1))
    second = op("ge", Index(p1), Index(32 + 0 * p1))
    value = op("where", first, Load("a", 32 * p0 + p1, F32, first), Load("b", 32 * p0 + p1 - 32, F32, second))
    return Body((loop(p0, HEADS), loop(p1, WIDTH)), (), (Store("y", WIDTH * p0 + p1, value, F32),))


BODIES = {
    "f32": rotary(WIDTH, WIDTH // 2),
    "bf16": rotary(WIDTH, WIDTH // 2, BF16),
    "uneven": rotary(WIDTH, 24),
    "symbolic": Body((loop(p0, s0), loop(p1, WIDTH)), (), rotary(WIDTH, WIDTH // 2).stores),
    "sum": rotary_sum(),
    "joined": side_by_side_in_memory(),
}


def expected(x: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = x.float().exp().to(BF16).float()
    return made, torch.cat([-made[:, half:], made[:, : x.shape[1] - half]], 1)


@pytest.mark.parametrize("name", ["f32", "bf16", "symbolic"])
def test_swapped_halves_are_computed_once(kernels: Kernels, name: str):
    dtype = BF16 if name == "bf16" else F32
    x, cos, sin = torch.randn(HEADS, WIDTH).to(dtype), torch.randn(WIDTH), torch.randn(WIDTH)
    y = torch.empty_like(x)
    kernels.run(name, {"x": x, "cos": cos, "sin": sin, "y": y}, s0=HEADS)
    made, turned = expected(x, WIDTH // 2)
    tolerance = {"rtol": 8e-3, "atol": 1e-3} if dtype is BF16 else {}
    torch.testing.assert_close(y, (made * cos + turned * sin).to(dtype), **tolerance)
    assert kernels.sources[name].text.count("exponential(") == 2
    assert kernels.sources[name].text.count("omp simd") == 1


def test_halves_are_joined_in_both_passes_over_a_row(kernels: Kernels):
    x, sin, total, y = torch.randn(HEADS, WIDTH), torch.randn(WIDTH), torch.empty(HEADS), torch.empty(HEADS, WIDTH)
    kernels.run("sum", {"x": x, "sin": sin, "total": total, "y": y})
    made, turned = expected(x, WIDTH // 2)
    value = made + turned * sin
    torch.testing.assert_close(total, value.sum(1))
    torch.testing.assert_close(y, value - 0.5 * value.sum(1, keepdim=True))
    assert "r0_32" in kernels.sources["sum"].text


def test_pieces_of_different_lengths_or_buffers_are_not_joined(kernels: Kernels):
    for name in ("uneven", "joined"):
        assert kernels.whole_vectors(name).count("omp simd") == 2
    a, b, y = torch.randn(HEADS, 32), torch.randn(HEADS, 32), torch.empty(HEADS, WIDTH)
    kernels.run("joined", {"a": a, "b": b, "y": y})
    assert torch.equal(y, torch.cat([a, b], 1))
