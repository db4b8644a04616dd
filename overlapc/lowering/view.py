"""Lowers ops that rearrange elements in ways that no layout describes: flips, rolls, repeats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from overlapc.ir.body import Value
from overlapc.ir.indexing import ModularIndexing
from overlapc.ir.ops import View
from overlapc.lowering.context import Lowering
from overlapc.lowering.indexing import positioned
from overlapc.lowering.table import Impossible, lowers

aten = torch.ops.aten


@lowers(aten.flip.default)
def flip(context: Lowering, x: View, dims: Sequence[int]) -> View:
    turned = {dim % max(len(x.size), 1) for dim in dims}

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        at = [x.size[dim] - 1 - here if dim in turned else here for dim, here in enumerate(position)]
        return context.element(x, at)

    return positioned(context, value)


@lowers(aten.roll.default)
def roll(context: Lowering, x: View, shifts: Sequence[Any], dims: Sequence[int] = ()) -> View:
    if not dims and len(x.size) != 1:
        raise Impossible("a roll over the flattened tensor")
    by: dict[int, Any] = {}
    for dim, shift in zip(dims or (0,), shifts, strict=True):
        by[dim % len(x.size)] = by.get(dim % len(x.size), 0) + shift
    if not all(isinstance(shift, int) and (shift >= 0 or x.size[dim].is_Integer) for dim, shift in by.items()):
        raise Impossible("a symbolic shift, or a negative one of a symbolic size")

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        at = list(position)
        for dim, shift in by.items():
            size = x.size[dim]
            # The dividend stays positive, because C's remainder of a negative number is negative.
            back = size - sympy.Integer(shift) % size if size.is_Integer else size - ModularIndexing(shift, 1, size)
            at[dim] = ModularIndexing(position[dim] + back, sympy.S.One, size)
        return context.element(x, at)

    return positioned(context, value)


@lowers(aten.repeat.default)
def repeat(context: Lowering, x: View, repeats: Sequence[Any]) -> View:
    more = len(repeats) - len(x.size)

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        at = [
            here if times == 1 else ModularIndexing(here, sympy.S.One, size)
            for here, times, size in zip(position[more:], repeats[more:], x.size, strict=True)
        ]
        return context.element(x, at)

    return positioned(context, value)
