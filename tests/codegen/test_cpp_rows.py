"""Short rows are processed together, one per vector lane: any number of them, one or several loops, symbolic sizes."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from overlapc.ir.body import Body, Load, Reduce, Store, op
from tests.codegen.cpp_bodies import rms_norm, softmax
from tests.codegen.cpp_kernels import Kernels
from tests.codegen.terms import loop, number, p0, p1, r0, s0, total

F32 = torch.float32


def heads_scaled(tokens: int, heads: int, width: int) -> Body:
    """Return a body that divides every head by its norm, scales it by a weight per token, and stores the norm."""
    at = heads * width * p0 + width * p1 + r0
    x, weight = Load("x", at, F32), Load("w", p0, F32)
    norm = op("sqrt", total(op("mul", x, x)))
    largest = Reduce("max", op("abs", x), F32)
    y = op("mul", op("div", x, op("add", norm, number(1e-6))), op("mul", weight, largest))
    stores = (Store("y", at, y, F32), Store("norm", heads * p0 + p1, norm, F32))
    return Body((loop(p0, tokens), loop(p1, heads)), (loop(r0, width),), stores)


def sums(width: int, dtype: torch.dtype) -> Body:
    """Return a body for the sums of squares of 40 rows."""
    x = Load("x", width * p0 + r0, dtype)
    return Body((loop(p0, 40),), (loop(r0, width),), (Store("y", p0, Reduce("sum", op("mul", x, x), dtype), dtype),))


SUMS = [(width, dtype) for width in (2, 7, 16, 33, 64, 100, 512, 513) for dtype in (F32, torch.float64)]
BODIES = {
    **{f"sum_{dtype}_{width}": sums(width, dtype) for width, dtype in SUMS},
    "rms_norm": rms_norm(201, 100),
    "softmax": softmax(203, 77),
    "rms_norm_symbolic": rms_norm(s0, 60),
    "heads": heads_scaled(70, 8, 33),
    "pairs": heads_scaled(70, 2, 33),  # too few heads for a vector: tokens are processed together
}


def test_short_rows_are_processed_together(kernels: Kernels):
    together = [source.text for name, source in kernels.sources.items() if not name.startswith("sum_")]
    assert all("lane < lanes" in text for text in together)
    assert "p0 = p0_block + lane" in kernels.sources["pairs"].text
    assert "p1 = p1_block + lane" in kernels.sources["heads"].text


@pytest.mark.parametrize(
    ("name", "rows", "columns"), [("rms_norm", 201, 100)] + [("rms_norm_symbolic", n, 60) for n in (1, 16, 37)]
)
def test_rms_norm_of_short_rows_equals_eager(kernels: Kernels, name: str, rows: int, columns: int):
    x, w = torch.randn(rows, columns), torch.randn(columns)
    y, scale = torch.empty_like(x), torch.empty(rows)
    kernels.run(name, {"x": x, "w": w, "y": y, "scale": scale}, s0=rows)
    torch.testing.assert_close(y, F.rms_norm(x, (columns,), w, 1e-5))
    torch.testing.assert_close(scale, torch.rsqrt(x.pow(2).mean(1) + 1e-5))


def test_softmax_computes_its_exponentials_once(kernels: Kernels):
    x, y, top = torch.randn(203, 77) * 5, torch.empty(203, 77), torch.empty(203)
    x[3] = -torch.inf
    kernels.run("softmax", {"x": x, "y": y, "top": top})
    assert kernels.whole_vectors("softmax").count("exponential(") == 1
    torch.testing.assert_close(y, x.softmax(1), equal_nan=True)
    assert torch.equal(top, x.amax(1))


@pytest.mark.parametrize(("name", "heads"), [("heads", 8), ("pairs", 2)])
def test_rows_over_several_loops_equal_eager(kernels: Kernels, name: str, heads: int):
    x, w = torch.randn(70, heads, 33), torch.randn(70)
    y, norm = torch.empty_like(x), torch.empty(70, heads)
    kernels.run(name, {"x": x, "w": w, "y": y, "norm": norm})
    expected = x.double().norm(dim=-1)
    torch.testing.assert_close(norm, expected.float())
    scale = w[:, None].double() * x.double().abs().amax(-1) / (expected + 1e-6)
    torch.testing.assert_close(y, (x.double() * scale[..., None]).float())


@pytest.mark.parametrize(("width", "dtype"), SUMS)
def test_the_terms_of_short_rows_are_summed_after_the_loop(kernels: Kernels, width: int, dtype: torch.dtype):
    torch.manual_seed(width)  # fixed because the tolerance is only two roundings
    x, y = torch.randn(40, width, dtype=dtype), torch.empty(40, dtype=dtype)
    kernels.run(f"sum_{dtype}_{width}", {"x": x, "y": y})
    exact = x.double().pow(2).sum(1)
    torch.testing.assert_close(y.double(), exact, rtol=2e-7 * (1 if dtype is F32 else 1e-8), atol=0)
    assert ("sum_terms" in kernels.sources[f"sum_{dtype}_{width}"].text) == (width <= 512)
