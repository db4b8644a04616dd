"""Splits a loop into pieces within which conditions on positions are constant, so that they need no masks or selects.

    for p0 < 96: y[p0] = p0 < 32 ? a[p0] : b[p0 - 32]   ->   for p0 < 32: y[p0] = a[p0];  for 32 <= p0 < 96: y[p0] = …

Concatenation, padding, rotary embeddings and causal masks are such loops. A border may depend on outer loops.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import sympy

from overlapc.codegen.cpp.loop_plan import stride
from overlapc.ir.body import Loop, Op, Value
from overlapc.ir.settle import whole_number

MOST_PIECES = 16  # a loop is split into fewer pieces than this, because every piece repeats the loop's body
SHORTEST_PIECE = 16  # least iterations of a piece on average; shorter ones would not fill a vector


@dataclass(frozen=True, slots=True)
class LoopPiece:
    """Iterations from `begin` up to `end` (None: the loop's own bounds), and the bool values that are known there."""

    begin: sympy.Expr | None = None
    end: sympy.Expr | None = None
    facts: Mapping[Value, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Border:
    """The iteration `at` where a condition changes: it is `below` before `at` and the opposite from there on."""

    at: sympy.Expr
    below: bool


def pieces(values: Sequence[Value], loop: Loop) -> list[LoopPiece]:
    """Split `loop` into pieces, in order, for a body of `values` (operands first); one piece leaves it whole."""
    borders = {value: border for value in values if (border := _border(value, loop.symbol)) is not None}
    places = _sorted({border.at for border in borders.values()})
    if places is not None and loop.size.is_Integer:
        places = [at for at in places if not at.is_Integer or 0 < at < loop.size]
        if int(loop.size) < SHORTEST_PIECE * (len(places) + 1):
            return [LoopPiece()]
    if not places or len(places) >= MOST_PIECES:
        return [LoopPiece()]
    found = []
    for begin, end in zip([None, *places], [*places, None], strict=True):
        known = {value: border.below == _is_before(begin, border.at) for value, border in borders.items()}
        found.append(LoopPiece(begin, end, _consequences(values, known)))
    return found


def _border(value: Value, symbol: sympy.Symbol) -> _Border | None:
    """Return where a comparison of positions changes along `symbol`; None for any other value."""
    if not isinstance(value, Op) or value.name not in ("lt", "le", "gt", "ge"):
        return None
    left, right = map(whole_number, value.args)
    if left is None or right is None:
        return None
    difference = sympy.expand(left - right)
    step = stride(difference, symbol)
    if step not in (1, -1):
        return None
    rest = sympy.expand(difference - step * symbol)
    strictly, falls = value.name in ("lt", "ge"), step == -1
    less = value.name in ("lt", "le")  # true while `left` is small; "gt" and "ge" are the opposites
    at = -rest + (0 if strictly else 1) if not falls else rest + (1 if strictly else 0)
    return _Border(at, less != falls)


def _sorted(places: Iterable[sympy.Expr]) -> list[sympy.Expr] | None:
    """Return `places` in ascending order; None if their order depends on symbols."""
    places = list(places)
    distances = [sympy.expand(at - places[0]) for at in places]
    if not all(distance.is_Integer for distance in distances):
        return None
    return [at for _, at in sorted(zip(distances, places, strict=True), key=lambda pair: int(pair[0]))]


def _is_before(begin: sympy.Expr | None, at: sympy.Expr) -> bool:
    """Whether a piece that starts at `begin` lies before the border `at`."""
    if begin is None:
        return not (at.is_Integer and at <= 0)
    return bool(sympy.expand(at - begin) > 0)


def _consequences(values: Iterable[Value], known: dict[Value, bool]) -> dict[Value, bool]:
    """Extend `known` by the values that follow from it by and, or, not, and return it."""
    for value in values:
        if value in known or not isinstance(value, Op):
            continue
        args = [known.get(arg) for arg in value.args]
        if value.name == "logical_not" and args[0] is not None:
            known[value] = not args[0]
        elif value.name == "logical_and" and (False in args or args == [True, True]):
            known[value] = False not in args
        elif value.name == "logical_or" and (True in args or args == [False, False]):
            known[value] = True in args
    return known
