"""Lowers the top-k of short rows, as in routers of experts, to one reduction per chosen element."""

from __future__ import annotations

from typing import Any

import sympy
import torch

from overlapc.ir.body import Body, Index, Reduce, Value, op
from overlapc.ir.conversions import cast, constant
from overlapc.ir.ops import View
from overlapc.lowering.context import Lowering
from overlapc.lowering.reduction import reduction_loops
from overlapc.lowering.table import Impossible, lowers

aten = torch.ops.aten
MOST_CHOSEN = 16  # most elements chosen from a row: each takes a reduction over the row
LONGEST_CHOICE = 2048  # most elements per row times number chosen: the sizes of routers of experts


@lowers(aten.topk.default)
def topk(context: Lowering, x: View, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Choose the largest elements of a short row, and their positions, one after another.

    The first of equal elements comes first; a NaN comes before all numbers.
    """
    if not x.size or not isinstance(k, int) or not 1 <= k <= MOST_CHOSEN:
        raise Impossible(f"the first {k} of a row")
    if x.dtype != torch.float32:  # equal elements are common in shorter formats, and eager orders them differently
        raise Impossible(f"the largest of {x.dtype}")
    dim = dim % len(x.size)
    if not x.size[dim].is_Integer or int(x.size[dim]) * k > LONGEST_CHOICE or not largest:
        raise Impossible(f"the first {k} of {x.size[dim]}, {'largest' if largest else 'smallest'} first")

    def kernel(wanted: int) -> View:
        def body(out: View) -> Body:
            parallel, inner, position = reduction_loops(context, x, (dim,))
            found = largest_of(context.element(x, position), Index(position[dim]), int(x.size[dim]), k)
            stores = []
            for number, pair in enumerate(found):
                place = [*position[:dim], sympy.Integer(number), *position[dim + 1 :]]
                stores.append(context.store(out, place, pair[wanted]))
            return Body(parallel, inner, tuple(stores))

        with context.for_item(wanted):
            return context.loops(body)

    return kernel(0), kernel(1)


def largest_of(value: Value, place: Value, length: int, count: int) -> list[tuple[Value, Value]]:
    """Return the `count` largest elements of a float32 row and their positions, in order.

    One integer key holds an element in its upper half and its reversed position in the lower half. Keys are distinct,
    so the elements not chosen yet are those whose key is less than the last chosen key, and a choice takes one
    reduction.
    """

    def integer(number: int) -> Value:
        return constant(number, torch.int64)

    upper = op("where", op("isnan", value), constant(2**31 - 1, torch.int32), _in_order(_bits(value, torch.int32)))
    last = integer(length - 1)
    key = op("add", op("shift_left", cast(upper, torch.int64), integer(32)), op("sub", last, place))
    left: Value = key
    found: list[tuple[Value, Value]] = []
    for _ in range(count):
        best = Reduce("max", left, torch.int64)
        bits = _in_order(cast(op("shift_right", best, integer(32)), torch.int32))
        found.append((_bits(bits, torch.float32), op("sub", last, op("bitwise_and", best, integer(2**32 - 1)))))
        left = op("where", op("lt", key, best), key, integer(-(2**63)))
    return found


def _bits(value: Value, dtype: torch.dtype) -> Value:
    return op("bitcast", value, dtype=dtype)


def _in_order(bits: Value) -> Value:
    """Map the bits of a float32 to an integer of the same order, or back: it flips those of negative numbers."""
    sign = op("shift_right", bits, constant(31, torch.int32))
    return op("bitwise_xor", bits, op("bitwise_and", sign, constant(2**31 - 1, torch.int32)))
