"""Splits loops where conditions on their position change, so that one iteration computes an element of every part.

    for p0 < R, p1 < 128:  y[128*p0 + p1] = where(p1 < 64, -x[128*p0 + p1 + 64], x[128*p0 + p1 - 64])
 -> for p0 < R, p1 < 64:   y[128*p0 + p1] = -x[128*p0 + p1 + 64];  y[128*p0 + p1 + 64] = x[128*p0 + p1]

    for p0 < R, p1 < 2:     y[2*p0 + p1] = where(p1 == 0, a[p0], b[p0])
 -> for p0 < R:             y[2*p0] = a[p0];  y[2*p0 + 1] = b[p0]

Joined tensors, swapped halves (rotary embeddings), interleaved elements and gradients of slices have such loops.
Afterwards every element is read once, without a mask, and the loops match those of kernels that run over one part, such
as the activation of one half of a product. This is done when no more kernels fuse without it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from functools import partial

import sympy

from overlapc.fusion.simplify import simplified
from overlapc.fusion.unroll import JOINS
from overlapc.ir.body import (
    Body,
    Constant,
    Index,
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
from overlapc.ir.settle import settled, whole_number
from overlapc.ir.template import once_for_all_buffers

MOST_PARTS = 8
SHORTEST_PART = 16  # least iterations left of a loop: whole cache sectors of a GPU (32 bytes) in two-byte formats
LARGEST_CUT = 256  # most values in the result
MOST_INTERLEAVED = 4  # most tensors whose elements alternate in memory
_ORDERS = ("lt", "ge", "le", "gt")


def cut(body: Body) -> Body:
    """Return `body` with its loops split into equal parts where conditions change; the same object if none is split.

    Splitting a reduction loop changes the order of its sums.
    """
    return (_cut(body) if _guards(body) else None) or body


@once_for_all_buffers
def _cut(body: Body) -> Body | None:
    guards = _guards(body)
    for loop in (*body.loops, *body.reduction):
        part = _part(loop, body, guards)
        if part is None or (loop in body.reduction and not _may_join(body)):
            continue
        made = _cut_at(body, loop, part)
        if made is not None and (part > 1 or len(_guards(made)) < len(guards)):
            return cut(made)
    return body


# --- where to split


def _guards(body: Body) -> set[Value]:
    """Return the conditions that select a value or guard a load, and their parts."""
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
    """Return the length of equal parts of `loop` within which no condition changes; None if there would be too many."""
    if not loop.size.is_Integer:
        return None
    size = int(loop.size)
    borders = {border for guard in guards if (border := _border(guard, loop, body.ranges())) is not None}
    borders = {border for border in borders if 0 < border < size}
    if size <= MOST_INTERLEAVED and (borders or any(_chooses(guard, loop) for guard in guards)):
        return 1
    part = math.gcd(size, *borders)
    return part if borders and size // part <= MOST_PARTS and part >= SHORTEST_PART else None


def _chooses(guard: Value, loop: Loop) -> bool:
    """Whether `guard` compares the position in `loop` alone for equality, as for every second element."""
    return (
        isinstance(guard, Op)
        and guard.name in ("eq", "ne")
        and all(isinstance(arg, Index | Constant) for arg in guard.args)
        and {symbol for arg in guard.args for expr in arg.indices() for symbol in expr.free_symbols} == {loop.symbol}
    )


def _border(guard: Value, loop: Loop, ranges: Ranges) -> int | None:
    """Return the iteration of `loop` at which `guard` changes; None if that depends on other loops."""
    if not isinstance(guard, Op) or guard.name not in _ORDERS:
        return None
    left, right = map(whole_number, guard.args)
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


def _may_join(body: Body) -> bool:
    """Whether each reduction may combine several elements per iteration, in any order."""
    reduces = [value for value in body.values() if isinstance(value, Reduce)]
    return not body.scans() and all(reduce.kind in JOINS and reduce.dtype is reduce.arg.dtype for reduce in reduces)


# --- splitting


def _cut_at(body: Body, loop: Loop, part: int) -> Body | None:
    """Return `body` with `loop` over one part, whose iterations compute all parts; None if it gets too large."""
    size = sympy.Integer(part)
    shorter = [tuple(Loop(inner.symbol, size) if inner is loop else inner for inner in nest) for nest in
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
            known[value] = settled(rebuild(value, operands, partial(_at, place, ranges)), ranges)
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
    """Return `store` for one part, or nothing if its mask is never true there."""
    mask = None if store.mask is None else known[store.mask]
    if mask is not None and as_number(mask) is False:
        return []
    indirect = tuple((symbol, known[value]) for symbol, value in store.indirect)
    mask = None if mask is None or as_number(mask) is True else mask
    return [dataclasses.replace(store, index=index, value=known[store.value], mask=mask, indirect=indirect)]
