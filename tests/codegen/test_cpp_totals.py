"""Kernels that run over rows and also total the columns, and stores that need not wait for a reduction."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch

from overlapc.ir.body import Body, Cast, Index, Load, Reduce, Store, Value, op
from tests.codegen.cpp_kernels import Kernels
from tests.codegen.terms import loop, p0, p1, r0, s0, s1

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64


def norm_backward(rows, columns, dtype: torch.dtype = F32, layer: str = "") -> Body:
    """Return a body for the gradients of a row-wise scaled input and, as totals, of weight and bias.

    layer: the end of the name of every buffer.
    """
    at = columns * p0 + r0
    x, g, w = Load(f"x{layer}", at, dtype), Load(f"g{layer}", at, dtype), Load(f"w{layer}", r0, dtype)
    mean = op("div", Reduce("sum", op("mul", op("mul", g, w), x), F32), Cast(Index(sympy.sympify(columns)), F32))
    dx = op("sub", op("mul", g, w), op("mul", x, mean))
    stores = (
        Store(f"dx{layer}", at, dx, dtype),
        Store(f"dw{layer}", r0, op("mul", g, op("mul", x, mean)), dtype, "sum"),
        Store(f"db{layer}", r0, g, F32, "sum"),
        Store(f"db16{layer}", r0, g, F32, "sum", total_dtype=BF16),
    )
    return Body((loop(p0, rows),), (loop(r0, columns),), stores)


def batches() -> Body:
    """Return a body for an integer sum and product over two loops of rows."""
    at = 35 * p0 + 5 * p1 + r0
    x = Load("x", at, I64)
    wide = op("sub", x, Reduce("min", x, I64))
    stores = (Store("sum", r0, wide, I64, "sum"), Store("prod", r0, op("add", wide, Index(p0)), I64, "prod"))
    return Body((loop(p0, 3), loop(p1, 7)), (loop(r0, 5),), stores)


def columns_and_elements(rows, columns) -> Body:
    """Return a body for the elements of an activation's gradient and their column sums."""
    at = columns * r0 + p0
    value: Value = op("exp", Load("x", at, F32))
    stores = (Store("y", at, value, F32), Store("db", p0, Reduce("sum", value, F32), F32))
    return Body((loop(p0, columns),), (loop(r0, rows),), stores)


BODIES = {
    "small": norm_backward(10, 7),
    "large": norm_backward(700, 96),
    "bf16": norm_backward(300, 64, BF16),
    "symbolic": norm_backward(s0, s1),
    "batches": batches(),
    "elements": columns_and_elements(200, 150),
    "few columns": columns_and_elements(5000, 3),
}


def run_norm(kernels: Kernels, name: str, rows: int, columns: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {"x": torch.randn(rows, columns), "g": torch.randn(rows, columns), "w": torch.randn(columns)}
    tensors = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    tensors |= {"dx": torch.empty(rows, columns, dtype=dtype), "dw": torch.empty(columns, dtype=dtype)}
    tensors |= {"db": torch.empty(columns), "db16": torch.empty(columns)}
    kernels.run(name, tensors, s0=rows, s1=columns)
    return tensors


@pytest.mark.parametrize(
    ("name", "rows", "columns", "dtype"),
    [
        ("small", 10, 7, F32),
        ("large", 700, 96, F32),
        ("bf16", 300, 64, BF16),
        ("symbolic", 65, 130, F32),
        ("symbolic", 1, 1, F32),
    ],
)
def test_rows_and_totals_of_columns_equal_eager(
    kernels: Kernels, name: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    found = run_norm(kernels, name, rows, columns, dtype)
    x, g, w = (found[key].double() for key in ("x", "g", "w"))
    mean = (g * w * x).mean(1, keepdim=True)
    expected = {"dx": g * w - x * mean, "dw": (g * x * mean).sum(0), "db": g.sum(0)}
    for key, want in expected.items():
        tolerance = 1e-2 if found[key].dtype is BF16 else 2e-6
        torch.testing.assert_close(found[key].double(), want, rtol=tolerance, atol=tolerance * 10)
    assert torch.equal(found["db16"], found["db"].bfloat16().float())


def test_totals_of_many_rows_are_as_exact_as_pairwise_sums(kernels: Kernels) -> None:
    rows = 1 << 18
    x = torch.full((rows, 2), 0.1)
    found = {"x": x, "g": x, "w": torch.ones(2), "dx": x.clone()}
    found |= {key: torch.empty(2) for key in ("dw", "db", "db16")}
    kernels.run("symbolic", found, s0=rows, s1=2)
    torch.testing.assert_close(found["db"].double(), x.double().sum(0), rtol=2e-7, atol=0)


def test_integer_sums_and_products_over_two_loops_of_rows_equal_eager(kernels: Kernels) -> None:
    x = torch.randint(-5, 5, (3, 7, 5))
    found = {"x": x, "sum": torch.empty(5, dtype=I64), "prod": torch.empty(5, dtype=I64)}
    kernels.run("batches", found)
    wide = x - x.amin(2, keepdim=True)
    assert torch.equal(found["sum"], wide.sum((0, 1)))
    assert torch.equal(found["prod"], (wide + torch.arange(3)[:, None, None]).prod(0).prod(0))


@pytest.mark.parametrize(("name", "rows", "columns"), [("elements", 200, 150), ("few columns", 5000, 3)])
def test_elements_and_their_column_sums_equal_eager(kernels: Kernels, name: str, rows: int, columns: int) -> None:
    found = {"x": torch.randn(rows, columns), "y": torch.empty(rows, columns), "db": torch.empty(columns)}
    kernels.run(name, found)
    torch.testing.assert_close(found["y"], found["x"].exp())
    torch.testing.assert_close(found["db"], found["x"].exp().sum(0))


def test_elements_are_stored_while_their_columns_are_summed(kernels: Kernels) -> None:
    # The input is read once: a store that depends on no reduction needs no second pass.
    assert kernels.whole_vectors("elements").count("in0[") == 1


def test_totals_do_not_depend_on_the_number_of_threads(kernels: Kernels) -> None:
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        try:
            results.append(run_norm(kernels, "large", 700, 96, F32))
        finally:
            torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(other[name], tensor) for name, tensor in results[0].items())


def test_equal_kernels_have_equal_text(tmp_path: Path) -> None:
    layers = ("_1", "_2")
    kernels = (Kernels({"norm": norm_backward(10, 7, layer=layer)}, tmp_path) for layer in layers)
    one, two = (each.sources["norm"] for each in kernels)
    assert (one.name, one.text) == (two.name, two.text)
    assert [each.replace("_1", "_2") for each in one.buffers] == list(two.buffers)
