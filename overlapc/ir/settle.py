"""Computes with positions ahead: conditions that are always true or always false, and arithmetic on them.

    where(p0 >= 0, a, b)   ->   a
    fmod(p0 + 3, 56)       ->   (p0 + 3) % 56, as an index
    load x[i0], i0 = p0 checked to be in 0 … n-1   ->   load x[p0]

They are left by inlining and by splitting loops: a table that is read at `arange`, the parts of concatenated tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from overlapc.ir.body import Body, Checked, Constant, Index, Load, Op, Value, as_number, topological
from overlapc.ir.conversions import constant
from overlapc.ir.indexing import ModularIndexing, Ranges, at_most, bounds, simplify, substitute
from overlapc.ir.rewriting import rewrite

COMPARES = frozenset("lt ge le gt eq ne".split())
ARITHMETIC = frozenset("add sub mul floor_div trunc_div remainder fmod".split())
INTEGERS = (torch.int32, torch.int64)
LARGEST = 2**30  # largest number that becomes an index: larger ones would make all indices of a kernel 64 bits wide


def with_known_positions(body: Body) -> Body:
    """Return `body` with indirect loads whose index is an index expression as plain loads; itself if there are none."""
    index_values = [
        value.arg if isinstance(value, Checked) else value for load in body.loads() for _, value in load.indirect
    ]
    if not any(_is_position(value) for value in index_values):
        return body
    ranges = body.ranges()
    return rewrite(body, body.loops, body.reduction, replace=lambda value: _at_known_position(settled(value, ranges)))


def _is_position(value: Value) -> bool:
    """Whether `value` is computed from positions and numbers only."""
    return all(
        isinstance(part, Index | Constant) or (isinstance(part, Op) and part.name in ARITHMETIC)
        for part in topological([value])
    )


def _at_known_position(value: Value) -> Value:
    if not isinstance(value, Load) or not value.indirect:
        return value
    known = {symbol: at.expr for symbol, at in value.indirect if isinstance(at, Index)}
    left = tuple((symbol, at) for symbol, at in value.indirect if symbol not in known)
    return dataclasses.replace(value, index=sympy.expand(substitute(value.index, known)), indirect=left)


def whole_number(value: Value) -> sympy.Expr | None:
    """Return `value` as an index expression if it is an index or an integer constant, else None."""
    if isinstance(value, Index):
        return value.expr
    if isinstance(value, Constant) and not value.dtype.is_floating_point:
        return sympy.Integer(int(value.number))
    return None


def settled(value: Value, ranges: Ranges) -> Value:
    """Return `value` simplified if its condition is always true or always false within `ranges`; else itself."""
    if isinstance(value, Load) and value.mask is not None:
        holds = as_number(value.mask)
        if holds is False:
            return constant(0, value.dtype)
        return value if holds is None else dataclasses.replace(value, mask=None)
    if isinstance(value, Checked) and as_number(value.condition) is True:
        return value.arg
    if not isinstance(value, Op):
        return value
    if value.name in COMPARES:
        return _compared(value, ranges)
    if value.name in ARITHMETIC and value.dtype in INTEGERS:
        return _computed(value, ranges)
    if value.name == "where" and isinstance(value.args[0], Constant):
        return value.args[1] if value.args[0].number else value.args[2]
    if value.name in ("logical_and", "logical_or"):
        return _both(value.args, settles=value.name == "logical_or") or value
    if value.name == "logical_not" and isinstance(value.args[0], Constant):
        return constant(not value.args[0].number, value.dtype)
    return value


def _compared(value: Op, ranges: Ranges) -> Value:
    left, right = map(whole_number, value.args)
    if left is None or right is None:
        return value
    difference = bounds(simplify(left - right, ranges), ranges)
    if difference is None or not all(limit.is_Integer for limit in difference):
        return value
    least, most = difference
    always, never = {
        "lt": (most < 0, least >= 0), "ge": (least >= 0, most < 0),
        "le": (most <= 0, least > 0), "gt": (least > 0, most <= 0),
        "eq": (least == most == 0, least > 0 or most < 0), "ne": (least > 0 or most < 0, least == most == 0),
    }[value.name]  # fmt: skip
    return constant(bool(always), value.dtype) if always or never else value


def _computed(value: Op, ranges: Ranges) -> Value:
    """Return the result of arithmetic as an `Index`; `value` itself unless both operands and the result are known.

    Known are bounds that are numbers of at most `LARGEST`. Quotients and remainders are taken of operands that are
    not negative, where rounding down and towards zero are the same.
    """
    left, right = map(whole_number, value.args)
    if left is None or right is None:
        return value
    if value.name in ("add", "sub", "mul"):
        result = {"add": left + right, "sub": left - right, "mul": left * right}[value.name]
    else:
        dividend = bounds(left, ranges)
        if dividend is None or not at_most(sympy.S.Zero, dividend[0]) or not at_most(sympy.S.One, right):
            return value
        divides = value.name in ("floor_div", "trunc_div")
        result = FloorDiv(left, right) if divides else ModularIndexing(left, sympy.S.One, right)
    result = simplify(result, ranges)
    limits = bounds(result, ranges)
    if limits is None or not all(limit.is_Integer and abs(limit) <= LARGEST for limit in limits):
        return value
    return Index(result, value.dtype)


def _both(args: Sequence[Value], *, settles: bool) -> Value | None:
    """Simplify "and" (settles=False) or "or" (settles=True) of two conditions if one is a constant; None if neither is.

    A constant equal to `settles` decides the result; otherwise the result is the other condition.
    """
    for one, other in (args, args[::-1]):
        known = as_number(one)
        if known is not None:
            return one if bool(known) is settles else other
    return None
