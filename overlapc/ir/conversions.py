"""Numbers, sizes and casts as values, with torch's conversion rules, for lowering and fusion."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import sympy
import torch
from torch.utils._sympy.functions import FloatPow, FloatTrueDiv, IntTrueDiv, ToFloat

from overlapc.ir.body import (
    LOW_PRECISION,
    Body,
    Cast,
    Checked,
    Constant,
    Index,
    Load,
    Op,
    Reduce,
    Scan,
    Store,
    Value,
    compute_dtype,
)
from overlapc.ir.body import op as make_op
from overlapc.ir.indexing import is_one, substitute
from overlapc.ir.rewriting import rewrite

# Arithmetic on sizes that yields a float, and the operation of values for each.
_FLOAT_OPS: dict[Any, str] = {
    sympy.Add: "add",
    sympy.Mul: "mul",
    sympy.Pow: "pow",
    FloatPow: "pow",
    IntTrueDiv: "div",
    FloatTrueDiv: "div",
}


def is_number(expr: sympy.Expr) -> bool:
    """Whether `number` can compute this expression over sizes."""
    if expr.is_integer or expr.is_Float or expr.is_Rational:
        return True
    return (expr.func is ToFloat or expr.func in _FLOAT_OPS) and all(map(is_number, expr.args))


def number(expr: sympy.Expr) -> Value:
    """Return the value of an expression over sizes, such as `1.0/ToFloat(s0)`, computed in double as in Python.

    `is_number` must hold for it.
    """
    if expr.is_Integer or expr.is_Float or expr.is_Rational:
        return Constant(float(expr), torch.float64)
    if expr.is_integer:
        return Cast(Index(expr), torch.float64)
    parts = [number(arg) for arg in expr.args]
    if expr.func is ToFloat:
        return parts[0]
    value = parts[0]
    for part in parts[1:]:
        value = make_op(_FLOAT_OPS[expr.func], value, part)
    return value


def cast(value: Value, dtype: torch.dtype) -> Value:
    """Return `value` in the compute dtype of `dtype`, without rounding to low precision."""
    target = compute_dtype(dtype)
    if value.dtype == target:
        return value
    if isinstance(value, Constant):
        return constant(value.number, target)
    if isinstance(value, Index) and target is torch.int64:  # narrower ones may wrap around
        return Index(value.expr, target)
    return Cast(value, target)


def converted(value: Value, source: torch.dtype, dtype: torch.dtype) -> Value:
    """Convert an element of a `source` tensor to `dtype`, rounding it if that is a low precision."""
    wide = cast(value, dtype)
    return wide if source is dtype or dtype not in LOW_PRECISION else Cast(wide, dtype)


# Operations whose result needs no more bits than their operands: an operand, its negation, or an operand rounded to an
# integer.
_KEEPS = frozenset("neg abs relu maximum minimum where copysign sign floor ceil trunc round".split())
_FRACTION_BITS = {torch.bfloat16: 7, torch.float16: 10}


def as_read(store: Store, value: Value) -> Value:
    """Return `value` as a reader in the kernel of `store` must use it: rounded as in memory."""
    if store.wide or store.memory_dtype not in LOW_PRECISION or _is_rounded(value, store.memory_dtype):
        return value
    return Cast(value, store.memory_dtype)


def numbers_last(body: Body) -> Body:
    """Return `body` with `x * 2` in place of `2 * x`, because forward and backward may contain either form."""

    def swapped(value: Value) -> Value | None:
        if not isinstance(value, Op) or value.name not in ("add", "mul"):
            return None
        first, second = value.args
        alone = isinstance(first, Constant) and not isinstance(second, Constant)
        return dataclasses.replace(value, args=(second, first)) if alone else None

    return rewrite(body, body.loops, body.reduction, replace=swapped)


def rounded_once(body: Body) -> Body:
    """Return `body` without casts to the dtype that its stores round to anyway; the same object if there are none."""
    stores = tuple(
        dataclasses.replace(store, value=store.value.arg)
        if isinstance(store.value, Cast) and store.value.to is store.memory_dtype and store.mode == "set"
        else store
        for store in body.stores
    )
    return body if stores == body.stores else Body(body.loops, body.reduction, stores)


def _is_rounded(value: Value, dtype: torch.dtype) -> bool:
    """Whether the operations that compute a value show that it is already rounded to `dtype`."""
    pending, seen = [value], {value}
    while pending:
        value = pending.pop()
        if isinstance(value, Op) and value.name in _KEEPS and dtype in _FRACTION_BITS:
            operands: tuple[Value, ...] = value.args[1:] if value.name == "where" else value.args
        elif isinstance(value, Reduce | Scan) and value.kind in ("max", "min"):
            operands = value.operands()
        elif isinstance(value, Checked):
            operands = (value.arg,)
        elif isinstance(value, Load):
            if value.memory_dtype is not dtype:
                return False
            continue
        elif isinstance(value, Cast):
            if value.to is not dtype and value.arg.dtype is not torch.bool:
                return False
            continue
        elif isinstance(value, Constant):
            number = float(value.number)
            if dtype not in _FRACTION_BITS or not (number != number or number in (0, 1, -1, math.inf, -math.inf)):
                return False
            continue
        else:
            return False
        pending += [operand for operand in operands if operand not in seen]
        seen.update(operands)
    return True


def _identity(kind: str, dtype: torch.dtype) -> Constant:
    """Return the result of a reduction over no elements; ops for which eager then raises are rejected earlier."""
    if kind in ("max", "min"):
        return constant(_limits(dtype)[kind == "min"], dtype)
    return constant(1 if kind in ("prod", "all") else 0, dtype)


def _limits(dtype: torch.dtype) -> tuple[float, float]:
    """Return the smallest and the largest number of a dtype."""
    if dtype.is_floating_point:
        return -math.inf, math.inf
    return (0, 1) if dtype == torch.bool else (torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def without_trivial_reductions(body: Body) -> Body:
    """Return `body` with every reduction over at most one element replaced by its result."""
    empty = any(loop.size == 0 for loop in body.reduction)
    if not body.reduction or not (empty or all(is_one(loop.size) for loop in body.reduction)):
        return body

    def replace(value: Value) -> Value | None:
        if not isinstance(value, Reduce | Scan):
            return None
        if empty:
            return _identity(value.kind, value.dtype)
        return constant(0, value.dtype) if value.kind in ("argmax", "argmin") else value.arg

    first = dict.fromkeys((loop.symbol for loop in body.reduction), sympy.S.Zero)
    return rewrite(body, body.loops, (), lambda expr: substitute(expr, first), replace)


def constant(number: Any, dtype: torch.dtype) -> Constant:
    """Return `number` as a constant of `dtype`, converted as torch converts a Python number: integers wrap around."""
    if dtype == torch.bool:
        return Constant(bool(number), dtype)
    if dtype.is_floating_point:
        return Constant(float(number), dtype)
    limits = torch.iinfo(dtype)
    return Constant((int(number) - limits.min) % 2**limits.bits + limits.min, dtype)
