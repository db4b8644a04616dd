"""Symbolic values of elements as functions of their positions in a tensor, and tensors of such elements.

An element is an integer expression, a condition (bool tensors), or one of a few numbers, each with the condition under
which the element has that value (`Cases`: a mask of 0 and -inf).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from overlapc.fx.masks.conditions import Box, Condition, negated

LARGEST_FACTOR = 1 << 20  # a position times this factor does not overflow
_INTEGERS = (torch.int64, torch.int32)  # narrower integers may overflow
_MOST_CASES = 6


class UnknownValue(Exception):
    """A value depends on more than positions, or on positions in a way that is not supported."""


@dataclass(frozen=True, slots=True)
class Cases:
    """One of several numbers: exactly one condition holds at each position."""

    of: Mapping[float, Condition]


Value: TypeAlias = "sympy.Expr | Condition | Cases"
Index = tuple[sympy.Expr, ...]
At = Callable[[Index, Box], Value]


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor whose elements are functions of their positions."""

    size: tuple[sympy.Expr, ...]
    at: At  # the element at an index that is within `size`

    def read(self, index: Index, box: Box) -> Value:
        """Return the element at an index of a larger tensor to which this tensor is broadcast."""
        own = index[len(index) - len(self.size) :]
        return self.at(tuple(sympy.S.Zero if n == 1 else each for n, each in zip(self.size, own, strict=True)), box)


def is_condition(value: Any) -> bool:
    return not isinstance(value, sympy.Expr | Cases)


def cases_of(value: Value) -> Cases:
    """Return a number as cases; UnknownValue for conditions, and for integers that depend on the position."""
    if isinstance(value, Cases):
        return value
    if isinstance(value, sympy.Expr):
        if not value.is_number:
            raise UnknownValue
        return Cases({float(value): True})
    raise UnknownValue


def number_of(value: Any) -> float:
    if isinstance(value, sympy.Expr) and value.is_number:
        return float(value)
    if isinstance(value, bool | int | float):
        return float(value)
    raise UnknownValue


def merged_cases(box: Box, found: Sequence[tuple[float, Condition]]) -> Cases:
    """Return (number, condition) pairs as cases, joining the conditions of equal numbers; UnknownValue for NaN."""
    by_number: dict[float, list[Condition]] = {}
    for number, condition in found:
        if math.isnan(number):
            raise UnknownValue
        if condition is not False:
            by_number.setdefault(number, []).append(condition)
    if len(by_number) > _MOST_CASES:
        raise UnknownValue
    return Cases({number: box.any_of(conditions) for number, conditions in by_number.items()})


def condition_of(value: Value, box: Box) -> Condition:
    """Return the condition under which a value is not zero."""
    if isinstance(value, Cases):
        return box.any_of(condition for number, condition in value.of.items() if number)
    if isinstance(value, sympy.Expr):
        return box.compare("ne", value, sympy.S.Zero)
    return value


def of_dtype(at: At, dtype: torch.dtype) -> At:
    """Return `at` with its values converted to `dtype`; UnknownValue where the conversion may change a number."""

    def converted(index: Index, box: Box) -> Value:
        value = at(index, box)
        if dtype == torch.bool:
            return condition_of(value, box)
        if is_condition(value):
            return merged_cases(box, [(1.0, value), (0.0, negated(value, box))])  # type: ignore[arg-type, list-item]
        if isinstance(value, Cases):
            if not dtype.is_floating_point and any(
                number != int(number) for number in value.of if math.isfinite(number)
            ):
                raise UnknownValue
            if not dtype.is_floating_point and any(not abs(number) < LARGEST_FACTOR for number in value.of):
                raise UnknownValue
            return value
        if dtype in _INTEGERS:
            return value
        return cases_of(value)

    return converted
