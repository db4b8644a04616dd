"""Unrolls reductions over a few elements, so that their kernels are element-wise and fuse like any other.

    for p0 < 64, reduce r0 < 2: y[p0] = sum(x[2*p0 + r0])   ->   for p0 < 64: y[p0] = x[2*p0] + x[2*p0 + 1]

The gradient of keys and values that several heads share is such a sum.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from functools import partial

import sympy

from overlapc.ir.body import Body, Reduce, Value, depends_on, op
from overlapc.ir.indexing import Ranges, simplify, substitute
from overlapc.ir.rewriting import canonical, rebuild, with_values

MOST_UNROLLED = 8  # most elements of a reduction: a vector's width of independent loads
LARGEST_UNROLLED = 128  # most values in the result

JOINS = {
    "sum": "add", "prod": "mul", "max": "maximum", "min": "minimum", "any": "logical_or", "all": "logical_and",
}  # fmt: skip


def unrolled(body: Body) -> Body:
    """Return `body` without reduction loops if they have few iterations; the same object otherwise.

    Positions (argmax), scans and stores for every reduced element need the loop.
    """
    count = body.reduction_numel()
    values = body.values()
    if not body.reduction or not count.is_Integer or not 1 <= count <= MOST_UNROLLED or body.scans():
        return body
    reduced = [value for value in values if isinstance(value, Reduce)]
    if len(values) * int(count) > LARGEST_UNROLLED or any(
        value.kind not in JOINS or value.dtype != value.arg.dtype for value in reduced
    ):
        return body
    symbols = [loop.symbol for loop in body.reduction]
    varies = depends_on(values, symbols)
    if any(
        not store.index.free_symbols.isdisjoint(symbols) or any(varies[value] for value in store.operands())
        for store in body.stores
    ):
        return body
    ranges = body.ranges()
    places = [
        dict(zip(symbols, map(sympy.Integer, at), strict=True))
        for at in itertools.product(*(range(int(loop.size)) for loop in body.reduction))
    ]
    now: list[dict[Value, Value]] = [{} for _ in places]  # for each iteration: value -> its unrolled form
    for value in values:
        if isinstance(value, Reduce):
            total = functools.reduce(partial(op, JOINS[value.kind]), (known[value.arg] for known in now))
            for known in now:
                known[value] = total
            continue
        for place, known in zip(places, now, strict=True):
            operands = tuple(known[operand] for operand in value.operands())
            known[value] = rebuild(value, operands, partial(_at, place, ranges))
    return canonical(with_values(body, body.loops, (), now[0]))


def _at(place: Mapping[sympy.Symbol, sympy.Expr], ranges: Ranges, expr: sympy.Expr) -> sympy.Expr:
    return simplify(substitute(expr, place), ranges)
