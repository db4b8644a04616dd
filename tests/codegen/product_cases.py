"""Matrix products as bodies, with prologues and epilogues; for the interpreter, for sm_90 and for a GPU."""

from __future__ import annotations

import sympy
import torch
import torch.nn.functional as F

from overlapc.ir.body import Body, Cast, Load, Loop, Reduce, Store, Value, op
from tests.codegen.case import Case, Tensors
from tests.codegen.terms import bf16, f16, f32, p0, p1, p2, r0, s0


def dot(left: Value, right: Value, dtype: torch.dtype | None) -> Reduce:
    """Return the dot product over r0 as lowering writes it; the factors are rounded to `dtype` first, if given."""
    factors = (left, right) if dtype is None else (Cast(left, dtype), Cast(right, dtype))
    return Reduce("dot", op("mul", *factors), f32)


def body(value: Value, rows: int, columns: int, length: int, dtype: torch.dtype) -> Body:
    loops = (Loop(p0, sympy.Integer(rows)), Loop(p1, sympy.Integer(columns)))
    return Body(loops, (Loop(r0, sympy.Integer(length)),), (Store("y", columns * p0 + p1, value, dtype),))


def plain(name: str, rows: int, columns: int, length: int, dtype: torch.dtype, transposed: bool = False) -> Case:
    """Return `a @ b`; transposed: b is stored as [columns, length], like a weight."""
    low = dtype if dtype.itemsize == 2 else None
    right = length * p1 + r0 if transposed else columns * r0 + p1
    value = dot(Load("a", length * p0 + r0, dtype), Load("b", right, dtype), low)

    def expected(t: Tensors) -> Tensors:
        b = t["b"].T if transposed else t["b"]
        return {"y": t["a"].double() @ b.double()}

    b = torch.randn((columns, length) if transposed else (length, columns), dtype=dtype)
    tensors = {"a": torch.randn(rows, length, dtype=dtype), "b": b, "y": torch.zeros(rows, columns, dtype=dtype)}
    return Case(name, body(value, rows, columns, length, dtype), tensors, expected, tolerance=1e-4)


def linear_silu(rows: int, columns: int, length: int) -> Case:
    """Return `silu(x @ w.T + bias) + residual` with an epilogue of two stores: silu's input is stored, too."""
    total = op(
        "add",
        dot(Load("a", length * p0 + r0, bf16), Load("b", length * p1 + r0, bf16), bf16),
        Load("bias", p1 + sympy.S.Zero, bf16),
    )
    sigmoid = op("sigmoid", total)
    value = op("add", op("mul", total, sigmoid), Load("residual", columns * p0 + p1, bf16))
    loops = (Loop(p0, sympy.Integer(rows)), Loop(p1, sympy.Integer(columns)))
    stores = (Store("h", columns * p0 + p1, total, f32), Store("y", columns * p0 + p1, value, bf16))
    made = Body(loops, (Loop(r0, sympy.Integer(length)),), stores)

    def expected(t: Tensors) -> Tensors:
        h = t["a"].float() @ t["b"].float().T + t["bias"].float()
        return {"h": h, "y": F.silu(h) + t["residual"].float()}

    tensors = {
        "a": torch.randn(rows, length, dtype=bf16),
        "b": torch.randn(columns, length, dtype=bf16) / 8,
        "bias": torch.randn(columns, dtype=bf16),
        "residual": torch.randn(rows, columns, dtype=bf16),
        "h": torch.zeros(rows, columns),
        "y": torch.zeros(rows, columns, dtype=bf16),
    }
    return Case("linear_silu_residual", made, tensors, expected, tolerance=1e-4)


def cast_prologue(rows: int, columns: int, length: int) -> Case:
    """Return a product whose prologue casts float32 weights and applies exp, for which padding with 0 gives 1."""
    a = op("exp", Load("a", length * p0 + r0, bf16))
    value = dot(a, Load("b", columns * r0 + p1, f32), bf16)

    def expected(t: Tensors) -> Tensors:
        return {"y": t["a"].float().exp().bfloat16().double() @ t["b"].bfloat16().double()}

    tensors = {
        "a": torch.randn(rows, length, dtype=bf16),
        "b": torch.randn(length, columns),
        "y": torch.zeros(rows, columns),
    }
    return Case("cast_prologue", body(value, rows, columns, length, f32), tensors, expected, tolerance=1e-4)


def batched(batch: int, rows: int, columns: int, length: int, shared: bool) -> Case:
    """Return a batched product. shared: batches have the same right factor, so that they are rows of one product."""
    a = Load("a", (p0 * rows + p1) * length + r0, bf16)
    b = Load("b", (0 if shared else p0 * columns * length) + length * p2 + r0, bf16)
    loops = tuple(Loop(symbol, sympy.Integer(size)) for symbol, size in ((p0, batch), (p1, rows), (p2, columns)))
    store = Store("y", (p0 * rows + p1) * columns + p2, dot(a, b, bf16), bf16)
    made = Body(loops, (Loop(r0, sympy.Integer(length)),), (store,))

    def expected(t: Tensors) -> Tensors:
        return {"y": t["a"].double() @ t["b"].double().mT}

    tensors = {
        "a": torch.randn(batch, rows, length, dtype=bf16),
        "b": torch.randn(*(() if shared else (batch,)), columns, length, dtype=bf16),
        "y": torch.zeros(batch, rows, columns, dtype=bf16),
    }
    return Case("batch_as_rows" if shared else "batch", made, tensors, expected, tolerance=1e-4)


def symbolic(rows: int, columns: int, length: int) -> Case:
    """Return a product with a symbolic number of rows."""
    value = dot(Load("a", length * p0 + r0, bf16), Load("b", columns * r0 + p1, bf16), bf16)
    loops = (Loop(p0, s0), Loop(p1, sympy.Integer(columns)))
    made = Body(loops, (Loop(r0, sympy.Integer(length)),), (Store("y", columns * p0 + p1, value, bf16),))

    def expected(t: Tensors) -> Tensors:
        return {"y": t["a"].double() @ t["b"].double()}

    tensors = {
        "a": torch.randn(rows, length, dtype=bf16),
        "b": torch.randn(length, columns, dtype=bf16),
        "y": torch.zeros(rows, columns, dtype=bf16),
    }
    return Case("symbolic_rows", made, tensors, expected, {"s0": rows}, tolerance=1e-4)


def product_cases() -> list[Case]:
    """Return every kind of product in sizes that no tile divides, for the interpreter."""
    torch.manual_seed(0)
    return [
        plain("bf16", 70, 45, 37, bf16),
        plain("bf16_transposed", 33, 130, 64, bf16, transposed=True),
        plain("f16_whole_tiles", 64, 64, 64, f16),
        plain("f32", 20, 35, 50, f32),
        plain("one_row", 1, 40, 24, bf16),
        linear_silu(40, 72, 48),
        cast_prologue(19, 33, 41),
        batched(3, 18, 20, 24, shared=False),
        batched(3, 18, 20, 24, shared=True),
        symbolic(37, 24, 40),
    ]


def large_product_cases() -> list[Case]:
    """Return products in sizes of training, for a GPU."""
    torch.manual_seed(0)
    return [
        plain("large_bf16", 4096, 1024, 2048, bf16),
        plain("large_bf16_transposed", 2048, 4096, 1024, bf16, transposed=True),
        linear_silu(4096, 1536, 1024),
        cast_prologue(2048, 1024, 1024),
        batched(32, 512, 512, 128, shared=False),
        symbolic(3000, 2048, 512),
    ]
