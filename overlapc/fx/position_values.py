"""Elements that follow from their positions in a tensor: as symbolic values, and tensors of such elements.

An element is an integer expression, a condition (bool tensors), or one of a few numbers and the condition under which
it is that one (`Cases`: a mask of 0 and -inf).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import sympy
import torch

from overlapc.fx.conditions import Box, Condition, negated

LARGEST_FACTOR = 1 << 20  # positions times that do not wrap around
_INTEGERS = (torch.int64, torch.int32)  # narrower ones may wrap around
_MOST_CASES = 6


class UnknownValue(Exception):
    """A value does not follow from positions, or not in a way that is known here."""


@dataclass(frozen=True, slots=True)
class Cases:
    """One of several numbers: exactly one condition holds at each position."""

    of: Mapping[float, Condition]


Value: TypeAlias = "sympy.Expr | Condition | Cases"
Index = tuple[sympy.Expr, ...]
At = Callable[[Index, Box], Value]


@dataclass(frozen=True, slots=True)
class Grid:
    """A tensor whose elements follow from their positions."""

    size: tuple[sympy.Expr, ...]
    at: At  # the element at an index that is within `size`

    def read(self, index: Index, box: Box) -> Value:
        """The element at an index of a larger tensor that this one is broadcast to."""
        own = index[len(index) - len(self.size) :]
        return self.at(tuple(sympy.S.Zero if n == 1 else each for n, each in zip(self.size, own, strict=True)), box)


def is_condition(value: Any) -> bool:
    return not isinstance(value, sympy.Expr | Cases)


def cases_of(value: Value) -> Cases:
    """A value as numbers; UnknownValue for integers that differ from position to position."""
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


def together(box: Box, found: Sequence[tuple[float, Condition]]) -> Cases:
    """Cases of numbers that may come more than once."""
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
    """Where a value is not zero."""
    if isinstance(value, Cases):
        return box.any_of(condition for number, condition in value.of.items() if number)
    if isinstance(value, sympy.Expr):
        return box.compare("ne", value, sympy.S.Zero)
    return value


def of_dtype(at: At, dtype: torch.dtype) -> At:
    """What `at` gives, as a tensor of `dtype` holds it."""

    def converted(index: Index, box: Box) -> Value:
        value = at(index, box)
        if dtype == torch.bool:
            return condition_of(value, box)
        if is_condition(value):
            return together(box, [(1.0, value), (0.0, negated(value, box))])  # type: ignore[arg-type, list-item]
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
