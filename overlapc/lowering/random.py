"""Lowers random numbers to functions of a seed and the element's position, for any kernel (see fx/random.py)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch

from overlapc.ir.body import Index, Load, Value, op
from overlapc.ir.conversions import cast, constant
from overlapc.ir.indexing import flat_index
from overlapc.ir.ops import View
from overlapc.lowering.context import Lowering
from overlapc.lowering.indexing import positioned
from overlapc.lowering.scatter import contiguous_strides
from overlapc.lowering.table import lowers_by_name
from overlapc.runtime.philox import UNIFORM_BITS, draw


class _Stream:
    """The random numbers of one seed for one element."""

    def __init__(self, seed: View, number: sympy.Expr) -> None:
        self.seed = tuple(Load(seed.buffer, seed.layout.at((sympy.Integer(at),)), torch.int64) for at in range(2))
        self.number = number

    def word(self, per_element: int, position: int) -> Value:
        """Return word `position` of the `per_element` words that every element has, as int64."""
        return op("random_word", *self.seed, Index(per_element * self.number + position))

    def uniform(self, per_element: int, position: int, dtype: torch.dtype) -> Value:
        """Return number `position` of the `per_element` numbers in [0, 1) that every element has."""
        if dtype == torch.float64:
            high, low = (self.word(2 * per_element, 2 * position + half) for half in range(2))
            upper = op("shift_left", high, constant(21, torch.int64))
            whole = op("bitwise_or", upper, op("shift_right", low, constant(11, torch.int64)))
            return op("mul", cast(whole, dtype), constant(2.0**-53, dtype))
        bits = UNIFORM_BITS[dtype]
        number = op("random", *self.seed, Index(per_element * self.number + position), dtype=torch.float32)
        if bits == UNIFORM_BITS[torch.float32]:
            return number
        steps = op("floor", op("mul", number, constant(2.0**bits, torch.float32)))  # so that none rounds up to 1
        return op("mul", steps, constant(2.0**-bits, torch.float32))


def _stream(seed: View, position: Sequence[sympy.Expr], size: Sequence[sympy.Expr]) -> _Stream:
    return _Stream(seed, flat_index(position, contiguous_strides(size), sympy.S.Zero))


@lowers_by_name("overlapc.seeds.default")
def seeds(context: Lowering, count: int, device: torch.device) -> Any:
    return context.extern(draw, (count, device), {}, pure=False)


@lowers_by_name("overlapc.drawn.default")
def drawn(context: Lowering, number: View) -> None:
    """Generate no code: the draw itself is a call with an effect, which stays in its place (fx/captured/drawn.py)."""


@lowers_by_name("overlapc.uniform.default")
def uniform(context: Lowering, seed: View, size: Sequence[Any], stride: Any, dtype: torch.dtype) -> View:
    extents = [sympy.sympify(extent) for extent in size]
    return positioned(context, lambda position: _stream(seed, position, extents).uniform(1, 0, dtype))


@lowers_by_name("overlapc.normal.default")
def normal(context: Lowering, seed: View, size: Sequence[Any], stride: Any, dtype: torch.dtype) -> View:
    extents = [sympy.sympify(extent) for extent in size]
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        stream = _stream(seed, position, extents)
        away = op("sub", constant(1, wide), stream.uniform(2, 0, wide))  # never 0, for the logarithm
        radius = op("sqrt", op("mul", constant(-2, wide), op("log", away)))
        return op("mul", radius, op("cos", op("mul", constant(2 * math.pi, wide), stream.uniform(2, 1, wide))))

    return positioned(context, value)


@lowers_by_name("overlapc.integers.default")
def integers(
    context: Lowering, seed: View, low: Any, high: Any, size: Sequence[Any], stride: Any, dtype: torch.dtype
) -> View:
    extents = [sympy.sympify(extent) for extent in size]
    low, high = sympy.sympify(low), sympy.sympify(high)
    start, span = context.scalar(low), high - low

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        stream = _stream(seed, position, extents)
        if span.is_Integer:
            below = (_below if span < 2**63 else _below_wide)(constant(span, torch.int64), stream)
        elif low.is_nonnegative:
            below = _below(Index(span), stream)
        else:  # a span of 2^63 or more is negative as int64
            distance = op("sub", context.scalar(high), start)
            is_wide = op("lt", distance, constant(0, torch.int64))
            below = op("where", is_wide, _below_wide(distance, stream), _below(distance, stream))
        return cast(op("add", below, start), dtype)

    return positioned(context, value)


def _below(span: Value, stream: _Stream) -> Value:
    """Return a whole number from 0 to `span - 1`."""
    whole = op("bitwise_xor", op("shift_left", stream.word(2, 0), constant(31, torch.int64)), stream.word(2, 1))
    return op("remainder", whole, span)


def _below_wide(span: Value, stream: _Stream) -> Value:
    """Return a number from 0 to `span - 1` as the 64 bits of an int64; `span` too: it is 2^63 or more, so negative."""
    whole = op("bitwise_or", op("shift_left", stream.word(2, 0), constant(32, torch.int64)), stream.word(2, 1))
    is_below = op("logical_or", op("ge", whole, constant(0, torch.int64)), op("lt", whole, span))
    return op("where", is_below, whole, op("sub", whole, span))
