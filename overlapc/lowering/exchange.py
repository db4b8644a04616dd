"""Lowers the sum of the parts that ranks exchange to an element-wise kernel."""

from __future__ import annotations

import functools

import sympy
import torch

from overlapc.fx.comm.exchange import SUM_OF_PARTS
from overlapc.ir.body import Value, op
from overlapc.ir.ops import View
from overlapc.lowering.context import Lowering
from overlapc.lowering.indexing import positioned
from overlapc.lowering.pointwise import convert
from overlapc.lowering.scatter import Position
from overlapc.lowering.table import lowers


@lowers(SUM_OF_PARTS)
def sum_of_parts(context: Lowering, own: View, others: View, rank: int, dtype: torch.dtype) -> View:
    def value(position: Position) -> Value:
        parts = [context.element(others, (sympy.Integer(at), *position)) for at in range(int(others.size[0]))]
        parts.insert(rank, context.element(own, position))
        return functools.reduce(functools.partial(op, "add"), (convert(part, dtype) for part in parts))

    return positioned(context, value)
