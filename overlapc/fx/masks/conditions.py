"""Conditions on indices: integer comparisons joined by "and" and "or".

A condition is simplified only by facts that hold for every value of the indices and of symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch.fx.experimental.symbolic_shapes import ShapeEnv


@dataclass(frozen=True, slots=True)
class NotNegative:
    """`value >= 0` for an integer `value`."""

    value: sympy.Expr

    def __str__(self) -> str:
        return f"{self.value} >= 0"


@dataclass(frozen=True, slots=True)
class AllOf:
    """All of several conditions, none of them constant or implied by another."""

    of: frozenset[NotNegative | AnyOf]

    def __str__(self) -> str:
        return " and ".join(sorted(f"({part})" if isinstance(part, AnyOf) else str(part) for part in self.of))


@dataclass(frozen=True, slots=True)
class AnyOf:
    """At least one of several conditions."""

    of: frozenset[NotNegative | AllOf]

    def __str__(self) -> str:
        return " or ".join(sorted(f"({part})" if isinstance(part, AllOf) else str(part) for part in self.of))


Condition = bool | NotNegative | AllOf | AnyOf


@dataclass(frozen=True)
class Box:
    """The indices that conditions refer to, and their ranges."""

    sizes: Mapping[sympy.Symbol, sympy.Expr]  # index -> size: its values are 0 to size - 1
    shape_env: ShapeEnv | None  # bounds of symbolic sizes; None: all sizes are numbers

    def not_negative(self, value: sympy.Expr) -> Condition:
        """Return the condition `value >= 0`; True or False if it is the same for all indices and all symbolic sizes."""
        value = sympy.expand(value)
        if self._is_certain(value):
            return True
        if self._is_certain(-value - 1):
            return False
        return NotNegative(value)

    def compare(self, op: str, left: sympy.Expr, right: sympy.Expr) -> Condition:
        """Return the condition `left op right` for integers. op: le, lt, ge, gt, eq or ne."""
        if isinstance(left, sympy.Abs) and op in ("le", "lt"):
            inside = left.args[0]
            return self.all_of([self.compare(op, inside, right), self.compare(op, -inside, right)])
        if isinstance(left, sympy.Abs) and op in ("ge", "gt"):
            return negated(self.compare("lt" if op == "ge" else "le", left, right), self)
        difference = left - right
        if op in ("eq", "ne"):
            equal = self.all_of([self.not_negative(difference), self.not_negative(-difference)])
            return equal if op == "eq" else negated(equal, self)
        if op in ("le", "lt"):
            difference = -difference
        return self.not_negative(difference if op in ("le", "ge") else difference - 1)

    def all_of(self, conditions: Iterable[Condition]) -> Condition:
        """Return "all of `conditions`", without implied ones; False if two of them exclude each other."""
        found = _flattened(conditions, AllOf, False)
        if found is None:
            return False
        compared = [part for part in found if isinstance(part, NotNegative)]
        for at, one in enumerate(compared):
            for other in compared[at + 1 :]:
                if self._is_certain(-one.value - other.value - 1):
                    return False
                if self._is_certain(sympy.expand(other.value - one.value)):
                    found.discard(other)
                elif self._is_certain(sympy.expand(one.value - other.value)):
                    found.discard(one)
        return AllOf(frozenset(found)) if len(found) > 1 else next(iter(found), True)

    def any_of(self, conditions: Iterable[Condition]) -> Condition:
        """Return "at least one of `conditions`"."""
        return negated(self.all_of([negated(part, self) for part in conditions]), self)

    def bounds(self, value: sympy.Expr) -> tuple[sympy.Expr, sympy.Expr] | None:
        """Return the minimum and maximum of `value`, in terms of sizes; None if it is not linear in the indices."""
        least = largest = value = sympy.expand(value)
        for index in value.free_symbols & self.sizes.keys():
            factor = value.coeff(index, 1)
            if not factor.is_number or sympy.expand(value - factor * index).has(index):
                return None
            last = self.sizes[index] - 1
            least = least.subs(index, 0 if factor > 0 else last)
            largest = largest.subs(index, last if factor > 0 else 0)
        return sympy.expand(least), sympy.expand(largest)

    def _is_certain(self, value: sympy.Expr) -> bool:
        """Whether `value` is known to be 0 or more for all indices and all symbolic sizes."""
        bounds = self.bounds(sympy.expand(value))
        if bounds is None:
            return False
        least = bounds[0]
        if least.is_number:
            return bool(least >= 0)
        known: Any = self.shape_env.bound_sympy(least) if self.shape_env is not None else None
        return known is not None and bool(known.lower >= 0)


def negated(condition: Condition, box: Box) -> Condition:
    """Return the negation of `condition`."""
    if isinstance(condition, bool):
        return not condition
    if isinstance(condition, NotNegative):
        return box.not_negative(-condition.value - 1)
    if isinstance(condition, AnyOf):
        return box.all_of([negated(part, box) for part in condition.of])
    found = _flattened([negated(part, box) for part in condition.of], AnyOf, True)
    if found is None:
        return True
    return AnyOf(frozenset(found)) if len(found) > 1 else next(iter(found), False)


def _flattened(conditions: Iterable[Condition], kind: type[AllOf | AnyOf], decides: bool) -> set[Any] | None:
    """Return the parts of `conditions`, replacing each of `kind` by its parts; None if one of them is `decides`."""
    found: set[Any] = set()
    for part in conditions:
        if part is decides:
            return None
        if isinstance(part, kind):
            found |= part.of
        elif not isinstance(part, bool):
            found.add(part)
    return found
