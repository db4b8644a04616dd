"""Loops cut where conditions on their position change, so that one iteration makes an element of every part.

    for p0 < R, p1 < 128:  y[128*p0 + p1] = where(p1 < 64, -x[128*p0 + p1 + 64], x[128*p0 + p1 - 64])
 -> for p0 < R, p1 < 64:   y[128*p0 + p1] = -x[128*p0 + p1 + 64];  y[128*p0 + p1 + 64] = x[128*p0 + p1]

Joined tensors, halves that change places (rotary embeddings) and gradients of slices are such loops. Every element is
then read once, without a mask, and a kernel that runs over one part, such as the activation of one half of a product,
has the same loops. Done when nothing fuses any more as it stands.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from functools import partial

import sympy

from overlapc.fusion.simplify import simplified
from overlapc.fusion.unroll import JOINS
from overlapc.ir.body import (
    Body,
    Constant,
    Index,
    Load,
    Loop,
    Op,
    Reduce,
    Store,
    Value,
    as_number,
    depends_on,
    ranges_of,
)
from overlapc.ir.indexing import Ranges, bounds, simplify, substitute
from overlapc.ir.rewriting import canonical, rebuild
from overlapc.ir.values import constant

MOST_PARTS = 8
SHORTEST_PART = 16  # iterations of a loop that is left: whole sectors of a GPU's cache, 32 bytes in two-byte formats
LARGEST_CUT = 256  # values in the result
_COMPARES = ("lt", "ge", "le", "gt")


def cut(body: Body) -> Body:
    """`body` with its loops cut into equal parts at whose borders conditions change; the same object if there are none.

    Sums of a reduction loop that is cut are added up in another order.
    """
    guards = _guards(body)
    for loop in (*body.loops, *body.reduction):
        part = _part(loop, body, guards)
        if part is None or (loop in body.reduction and not _may_join(body)):
            continue
        made = _cut_at(body, loop, part)
        if made is not None:
            return cut(made)
    return body


# --- where


def _guards(body: Body) -> set[Value]:
    """Conditions that select a value or guard a load."""
    pending = [value.mask for value in body.loads() if value.mask is not None]
    pending += [value.args[0] for value in body.values() if isinstance(value, Op) and value.name == "where"]
    found: set[Value] = set()
    while pending:
        condition = pending.pop()
        if condition not in found:
            found.add(condition)
            if isinstance(condition, Op) and condition.name.startswith("logical"):
                pending += condition.args
    return found


def _part(loop: Loop, body: Body, guards: set[Value]) -> int | None:
    """Iterations of the equal parts of `loop` between whose borders no condition changes; None without few of them."""
    if not loop.size.is_Integer:
        return None
    size = int(loop.size)
    borders = {border for guard in guards if (border := _border(guard, loop, body.ranges())) is not None}
    borders = {border for border in borders if 0 < border < size}
    part = math.gcd(size, *borders)
    return part if borders and size // part <= MOST_PARTS and part >= SHORTEST_PART else None


def _border(guard: Value, loop: Loop, ranges: Ranges) -> int | None:
    """The iteration of `loop` with which `guard` changes, whatever the other loops do; None if it depends on them."""
    if not isinstance(guard, Op) or guard.name not in _COMPARES:
        return None
    left, right = map(_whole_number, guard.args)
    if left is None or right is None:
        return None
    step = sympy.expand(left - right)
    if guard.name in ("le", "gt"):
        step -= 1  # a <= b is a - 1 < b
    every = step.coeff(loop.symbol)
    if not every.is_Integer or every <= 0:
        return None
    first, rest = sympy.expand(step - every * loop.symbol).as_coeff_Add()
    inside = bounds(rest, ranges)
    if inside is None or inside[0] != 0 or not inside[1].is_Integer or inside[1] >= every or first % every != 0:
        return None
    return int(-first // every)


def _whole_number(value: Value) -> sympy.Expr | None:
    if isinstance(value, Index):
        return value.expr
    return sympy.Integer(value.number) if isinstance(value, Constant) and isinstance(value.number, int) else None


def _may_join(body: Body) -> bool:
    """Whether each reduction may take several elements an iteration, in whatever order."""
    reduces = [value for value in body.values() if isinstance(value, Reduce)]
    return not body.scans() and all(each.kind in JOINS and each.dtype is each.arg.dtype for each in reduces)


# --- how


def _cut_at(body: Body, loop: Loop, part: int) -> Body | None:
    """`body` with `loop` over one part, each iteration doing what all parts do; None where that is too much."""
    size = sympy.Integer(part)
    shorter = [tuple(Loop(each.symbol, size) if each is loop else each for each in nest) for nest in
               (body.loops, body.reduction)]  # fmt: skip
    loops, reduction = shorter
    ranges = ranges_of((*loops, *reduction))
    places = [{loop.symbol: loop.symbol + at * part} for at in range(int(loop.size) // part)]
    now: list[dict[Value, Value]] = [{} for _ in places]
    reduced = loop in body.reduction
    for value in body.values():
        if reduced and isinstance(value, Reduce):
            arg = functools.reduce(partial(_joined, JOINS[value.kind]), (known[value.arg] for known in now))
            for known in now:
                known[value] = Reduce(value.kind, arg, value.dtype)
            continue
        for place, known in zip(places, now, strict=True):
            operands = tuple(known[operand] for operand in value.operands())
            known[value] = _settled(rebuild(value, operands, partial(_at, place, ranges)), ranges)
    varies = depends_on(body.values(), [loop.symbol])
    stores: list[Store] = []
    for store in body.stores:
        once = reduced and loop.symbol not in store.index.free_symbols and not any(map(varies.get, store.operands()))
        if once and store.is_total:
            return None
        for place, known in list(zip(places, now, strict=True))[: 1 if once else None]:
            stores += _stored(store, known, _at(place, ranges, store.index))
    made = simplified(canonical(Body(loops, reduction, tuple(stores))))
    return made if len(made.values()) <= LARGEST_CUT else None


def _joined(name: str, one: Value, other: Value) -> Value:
    return Op(name, (one, other), one.dtype)


def _at(place: Mapping[sympy.Symbol, sympy.Expr], ranges: Ranges, expr: sympy.Expr) -> sympy.Expr:
    return simplify(substitute(expr, place), ranges)


def _stored(store: Store, known: Mapping[Value, Value], index: sympy.Expr) -> list[Store]:
    """`store` in one part; nothing where its mask never holds."""
    mask = None if store.mask is None else known[store.mask]
    if mask is not None and as_number(mask) is False:
        return []
    indirect = tuple((symbol, known[value]) for symbol, value in store.indirect)
    mask = None if mask is None or as_number(mask) is True else mask
    return [dataclasses.replace(store, index=index, value=known[store.value], mask=mask, indirect=indirect)]


def _settled(value: Value, ranges: Ranges) -> Value:
    """`value` without a condition that always holds here, or never."""
    if isinstance(value, Load) and value.mask is not None:
        holds = as_number(value.mask)
        if holds is False:
            return constant(0, value.dtype)
        return value if holds is None else dataclasses.replace(value, mask=None)
    if not isinstance(value, Op):
        return value
    if value.name in _COMPARES:
        return _compared(value, ranges)
    if value.name == "where" and isinstance(value.args[0], Constant):
        return value.args[1] if value.args[0].number else value.args[2]
    if value.name in ("logical_and", "logical_or"):
        return _both(value.args, settles=value.name == "logical_or") or value
    if value.name == "logical_not" and isinstance(value.args[0], Constant):
        return constant(not value.args[0].number, value.dtype)
    return value


def _compared(value: Op, ranges: Ranges) -> Value:
    left, right = map(_whole_number, value.args)
    if left is None or right is None:
        return value
    difference = bounds(simplify(left - right, ranges), ranges)
    if difference is None or not all(limit.is_Integer for limit in difference):
        return value
    least, most = difference
    always, never = {
        "lt": (most < 0, least >= 0), "ge": (least >= 0, most < 0),
        "le": (most <= 0, least > 0), "gt": (least > 0, most <= 0),
    }[value.name]  # fmt: skip
    return constant(bool(always), value.dtype) if always or never else value


def _both(args: Sequence[Value], *, settles: bool) -> Value | None:
    """Of two conditions the one that is left where the other is known, or what the known one `settles`."""
    for one, other in (args, args[::-1]):
        known = as_number(one)
        if known is not None:
            return one if bool(known) is settles else other
    return None
