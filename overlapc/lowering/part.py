"""Lowers ops that write a part of a tensor to element-wise kernels: every element tests whether it is in the part."""

from __future__ import annotations

from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from overlapc.ir.body import Index, Value, op
from overlapc.ir.conversions import cast
from overlapc.ir.indexing import ModularIndexing, is_one
from overlapc.ir.ops import View
from overlapc.lowering.context import Lowering
from overlapc.lowering.indexing import both, masked_element, positioned, within
from overlapc.lowering.scatter import Position
from overlapc.lowering.table import Impossible, lowers

aten = torch.ops.aten


@lowers(aten.slice_scatter.default)
def slice_scatter(
    context: Lowering, x: View, source: View, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> View:
    dim = dim % len(x.size)
    begin = _slice_start(x.size[dim], start)
    stride = sympy.sympify(step)

    def value(position: Position) -> Value:
        moved = list(position)
        past = position[dim] - begin
        moved[dim] = past if is_one(stride) else FloorDiv(past, stride)
        conditions = within(position[dim], begin, begin + source.size[dim] * stride, x.size[dim])
        if not is_one(stride):
            # A multiple of the stride is added so that the dividend is never negative.
            whole = position[dim] + begin * (stride - 1)
            conditions.append(op("eq", Index(ModularIndexing(whole, sympy.S.One, stride)), Index(sympy.S.Zero)))
        if not conditions:
            return cast(context.element(source, moved), x.dtype)
        mask = both(*conditions)
        return op("where", mask, cast(masked_element(source, moved, mask), x.dtype), context.element(x, position))

    return positioned(context, value)


def _slice_start(extent: sympy.Expr, start: Any) -> sympy.Expr:
    """Return where a slice begins, counted from the front and clamped to the dim."""
    begin = sympy.sympify(0 if start is None else start)
    if not (begin.is_Integer and extent.is_Integer):
        if begin.is_nonnegative:
            return begin
        raise Impossible("a symbolic start that may be negative")
    at = int(begin) + int(extent) if begin < 0 else int(begin)
    return sympy.Integer(min(max(at, 0), int(extent)))


@lowers(aten.select_scatter.default)
def select_scatter(context: Lowering, x: View, source: View, dim: int, index: Any) -> View:
    dim = dim % len(x.size)
    where = sympy.sympify(index)
    if not where.is_Integer:
        raise Impossible("a symbolic index")
    at = where + x.size[dim] if where < 0 else where

    def value(position: Position) -> Value:
        mask = op("eq", Index(position[dim]), Index(at))
        rest = [here for axis, here in enumerate(position) if axis != dim]
        return op("where", mask, cast(masked_element(source, rest, mask), x.dtype), context.element(x, position))

    return positioned(context, value)


@lowers(aten.diagonal_scatter.default)
def diagonal_scatter(context: Lowering, x: View, source: View, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    rank = len(x.size)
    row, column = dim1 % rank, dim2 % rank

    def value(position: Position) -> Value:
        mask = op("eq", Index(position[column] - position[row]), Index(sympy.Integer(offset)))
        along = position[row] if offset >= 0 else position[column]
        rest = [here for axis, here in enumerate(position) if axis not in (row, column)]
        inside = masked_element(source, (*rest, along), mask)
        return op("where", mask, cast(inside, x.dtype), context.element(x, position))

    return positioned(context, value)
