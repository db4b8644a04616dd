"""Lowers matrix products to generated kernels if the options request that; otherwise they stay library calls.

    mm: y[p0, p1] = sum over r0 of a[p0, r0] * b[r0, p1]

Factors are rounded to their own dtype, so that an inlined producer is multiplied as it would have been stored.
Transposed or broadcast operands are not copied: only their indices differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch

from overlapc.ir.body import Body, Cast, Loop, Reduce, Value, op
from overlapc.ir.conversions import cast
from overlapc.ir.indexing import loop_symbol
from overlapc.ir.ops import View
from overlapc.lowering.context import Lowering
from overlapc.lowering.table import Impossible, lowers

aten = torch.ops.aten

FACTOR_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product `[batch, rows, length] @ [batch, length, columns]` at the traced sizes, for the policy.

    strides: those of the last two dims of each factor, in elements.
    """

    batch: int
    rows: int
    columns: int
    length: int
    dtype: torch.dtype
    strides: tuple[tuple[int, int], tuple[int, int]]

    def __str__(self) -> str:
        layout = "".join("n" if strides[1] == 1 else "t" for strides in self.strides)
        batch = f"{self.batch}x" if self.batch > 1 else ""
        return f"{str(self.dtype).removeprefix('torch.')} {batch}{self.rows}x{self.columns}x{self.length} {layout}"


@lowers(aten.mm.default, aten.bmm.default)
def mm(context: Lowering, left: View, right: View) -> View:
    return _product(context, left, right)


@lowers(aten.addmm.default, aten.baddbmm.default)
def addmm(context: Lowering, added: View, left: View, right: View, *, beta: float = 1, alpha: float = 1) -> View:
    return _product(context, left, right, added, beta, alpha)


def _product(
    context: Lowering, left: View, right: View, added: View | None = None, beta: float = 1, alpha: float = 1
) -> View:
    """Add a kernel for `alpha * left @ right + beta * added`, computed in float32 and rounded once."""
    if left.dtype not in FACTOR_DTYPES or right.dtype is not left.dtype:
        raise Impossible(f"a product of {left.dtype} and {right.dtype}")
    if any(extent == 0 for extent in (*left.size, *right.size)):
        raise Impossible("a product of nothing")
    if not context.target.native_product(product_of(context, left, right)):
        raise Impossible("a library call")

    def body(out: View) -> Body:
        loops, position = context.loops_over(out.layout)
        *batch, row, column = position
        at = loop_symbol("r", 0)
        factors = (context.element(left, (*batch, row, at)), context.element(right, (*batch, at, column)))
        value: Value = Reduce("dot", op("mul", *(_rounded(factor, left.dtype) for factor in factors)), torch.float32)
        if alpha != 1:
            value = op("mul", value, cast(context.scalar(alpha), torch.float32))
        if added is not None and beta != 0:  # with beta = 0, NaN in `added` does not count, as in eager
            term = cast(context.element(added, position), torch.float32)
            value = op("add", value, term if beta == 1 else op("mul", term, cast(context.scalar(beta), torch.float32)))
        return Body(loops, (Loop(at, left.size[-1]),), (context.store(out, position, value),))

    return context.loops(body)


def product_of(context: Lowering, left: View, right: View) -> Product:
    """Return the sizes of `left @ right`, with hints for symbols."""
    hint = context.graph.hint

    def steps(view: View) -> tuple[int, int]:
        first, second = (hint(sympy.sympify(step)) for step in view.layout.stride[-2:])
        return first, second

    rows, length = (hint(extent) for extent in left.size[-2:])
    batch = hint(left.size[0]) if len(left.size) == 3 else 1
    return Product(batch, rows, hint(right.size[-1]), length, left.dtype, (steps(left), steps(right)))


def _rounded(value: Value, dtype: torch.dtype) -> Value:
    return Cast(value, dtype) if dtype in (torch.float16, torch.bfloat16) else value
