"""Lowers cumulative ops, which combine each element with all elements before it along one dim."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch

from overlapc.ir.body import Body, Scan, Value, compute_dtype
from overlapc.ir.conversions import converted
from overlapc.ir.ops import View
from overlapc.lowering.context import Lowering
from overlapc.lowering.reduction import normalized, reduction_loops
from overlapc.lowering.table import lowers

aten = torch.ops.aten


def scanned(context: Lowering, x: View, dim: int, finish: Callable[[Value, sympy.Expr], Value]) -> View:
    """Add a kernel with an output of x's shape; `finish` gets an element and its position along `dim`."""

    def body(out: View) -> Body:
        parallel, inner, position = reduction_loops(context, x, normalized(dim, len(x.size)))
        value = finish(context.element(x, position), inner[0].symbol)
        return Body(parallel, inner, (context.store(out, position, value),))

    return context.loops(body)


@lowers(aten.cumsum.default)
def cumsum(context: Lowering, x: View, dim: int, *, dtype: Any = None) -> View:
    return _arithmetic(context, "sum", x, dim)


@lowers(aten.cumprod.default)
def cumprod(context: Lowering, x: View, dim: int, *, dtype: Any = None) -> View:
    return _arithmetic(context, "prod", x, dim)


def _arithmetic(context: Lowering, kind: str, x: View, dim: int) -> View:
    out = context.value_of().dtype
    return scanned(
        context, x, dim, lambda value, at: Scan(kind, converted(value, x.dtype, out), compute_dtype(out), at)
    )


@lowers(aten.logcumsumexp.default)
def logcumsumexp(context: Lowering, x: View, dim: int) -> View:
    return scanned(context, x, dim, lambda value, at: Scan("logsumexp", value, value.dtype, at))


@lowers(aten.cummax.default)
def cummax(context: Lowering, x: View, dim: int) -> Any:
    return _extreme(context, "max", x, dim)


@lowers(aten.cummin.default)
def cummin(context: Lowering, x: View, dim: int) -> Any:
    return _extreme(context, "min", x, dim)


def _extreme(context: Lowering, kind: str, x: View, dim: int) -> Any:
    """Add kernels for the extreme values and for their positions; as both read `x`, fusion makes one kernel of them."""
    with context.for_item(0):
        values = scanned(context, x, dim, lambda value, at: Scan(kind, value, value.dtype, at))
    with context.for_item(1):
        return values, scanned(context, x, dim, lambda value, at: Scan(f"arg{kind}", value, torch.int64, at))
