"""Removes values that a kernel need not compute.

    where(c, where(c, a, 0) * b, where(not c, d, 0))   ->   where(c, a * b, d)
    where(c, cast(a), cast(b))   ->   cast(where(c, a, b))
    sum over r of where(r == t and c, a, 0)            ->   where(0 <= t < n and c, a, 0)
    x[i] + (x[i] where c, else 0)                      ->   x[i] + where(c, x[i], 0)

The first two come from joining tensors (`cat`, padding), where every part guards its loads. The third is the gradient
of selecting one element per row, as the loss of a classifier does; otherwise backward would read each row twice. The
fourth comes from a tensor that is read both padded and unpadded: each element is then loaded once, or once for all rows
if it is the same for them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

import sympy
import torch

from overlapc.ir.body import (
    Body,
    Cast,
    Constant,
    Index,
    Load,
    Loop,
    Op,
    Reduce,
    Scan,
    Value,
    as_number,
    depends_on,
    op,
)
from overlapc.ir.conversions import cast, constant
from overlapc.ir.facts import known_truth, learn, unseen_where_masked
from overlapc.ir.indexing import loop_symbol
from overlapc.ir.rewriting import canonical, rebuild, with_loops, with_values
from overlapc.ir.template import once_for_all_buffers

REACH = 64  # most values examined below one `where`: values with an equal guard are close to it


def simplified(body: Body) -> Body:
    """Return `body` without such values; the same object if there are none."""
    if not any(isinstance(value, Op) and value.name == "where" for value in body.values()):
        return body
    return _simplified(body) or body


@once_for_all_buffers
def _simplified(body: Body) -> Body | None:
    varies = depends_on(body.values(), {loop.symbol for loop in body.reduction})
    uses = Counter(operand for value in body.values() for operand in value.operands())
    uses.update(value for store in body.stores for value in store.operands())
    unmasked = {load for load in body.loads() if load.mask is None}
    unseen = unseen_where_masked(body)
    new: dict[Value, Value] = {}
    for value in body.values():
        built = rebuild(value, tuple(new[operand] for operand in value.operands()), lambda expr: expr)
        if isinstance(built, Op) and built.name == "where":
            built = _operation_first(_without_repeated_tests(built, uses), uses)
        elif isinstance(built, Reduce) and built.kind == "sum":
            built = _only_term(built, body, varies)
        elif isinstance(value, Load) and value.mask is not None:
            built = _read_once(value, built, unmasked, unseen)
        new[value] = built
        if built is not value:
            uses[built] = max(uses[built], uses[value])
            varies[built] = varies[value]
    if all(old is built for old, built in new.items()):
        return body
    return _without_reduction(with_values(body, body.loops, body.reduction, new))


# --- what is known inside a branch


def _without_repeated_tests(where: Op, uses: Mapping[Value, int]) -> Value:
    """Return `where` with branches that do not test its condition again.

    Values with other users are left alone: they are computed anyway, and a simplified copy would come in addition.
    """
    left = REACH

    def branch(value: Value, condition: Value, holds: bool, facts: Mapping[Value, bool]) -> Value:
        known = dict(facts)
        learn(condition, holds, known)
        return under(value, known)

    def under(value: Value, facts: Mapping[Value, bool]) -> Value:
        nonlocal left
        left -= 1
        if not isinstance(value, Op | Cast) or left < 0:
            return value  # loads and reductions are not entered: they are computed for both branches
        if isinstance(value, Op) and value.name == "where":
            condition, yes, no = value.args
            truth = known_truth(condition, facts)
            if truth is not None:
                return under(yes if truth else no, facts)
            if uses[value] > 1:
                return value
            operands: tuple[Value, ...] = (
                condition,
                branch(yes, condition, True, facts),
                branch(no, condition, False, facts),
            )
        elif uses[value] > 1:
            return value
        else:
            operands = tuple(under(operand, facts) for operand in value.operands())
        return value if operands == value.operands() else rebuild(value, operands, lambda expr: expr)

    condition, yes, no = where.args
    yes, no = branch(yes, condition, True, {}), branch(no, condition, False, {})
    return yes if yes is no else op("where", condition, yes, no)


def _operation_first(value: Value, uses: Mapping[Value, int]) -> Value:
    """Rewrite `where(c, f(a), f(b))` to `f(where(c, a, b))`: one operation instead of two, as in joins of casts."""
    if not isinstance(value, Op) or value.name != "where":
        return value
    condition, yes, no = value.args
    if uses[yes] > 1 or uses[no] > 1:
        return value  # f(a) or f(b) is computed anyway
    if isinstance(yes, Cast) and isinstance(no, Cast) and yes.to is no.to and yes.arg.dtype is no.arg.dtype:
        return Cast(op("where", condition, yes.arg, no.arg), yes.to)
    if isinstance(yes, Op) and isinstance(no, Op) and (yes.name, len(yes.args), len(no.args)) == (no.name, 1, 1):
        (left,), (right,) = yes.args, no.args
        if left.dtype is right.dtype and yes.coarse == no.coarse:
            return Op(yes.name, (op("where", condition, left, right),), yes.dtype, yes.coarse)
    return value


# --- an element that is also read without a mask


def _read_once(load: Load, built: Value, unmasked: Container[Load], unseen: Container[Load]) -> Value:
    """Return the value of a masked `load` by the same load without a mask, if that is one of `unmasked`.

    built: `load` over new operands; returned if there is no such load.
    """
    if not isinstance(built, Load) or built.mask is None or replace(load, mask=None) not in unmasked:
        return built
    element = replace(built, mask=None)
    return element if load in unseen else op("where", built.mask, element, constant(0, load.dtype))


# --- one element of a row


def _only_term(total: Reduce, body: Body, varies: Mapping[Value, bool]) -> Value:
    """Return the only term of a sum in which all other terms are 0; `total` itself if it is not such a sum."""
    if len(body.reduction) != 1:
        return total
    factors: list[Value] = []
    arg = total.arg
    while isinstance(arg, Op) and arg.name == "mul":
        constant = [factor for factor in arg.args if not varies.get(factor, True)]
        if len(constant) != 1:
            return total
        factors += constant
        arg = arg.args[0] if constant[0] is arg.args[1] else arg.args[1]
    if not isinstance(arg, Op) or arg.name != "where" or arg.dtype is not total.dtype:
        return total
    condition, there, elsewhere = arg.args
    if as_number(elsewhere) != 0 or varies.get(there, True):
        return total
    conditions = _conjuncts(condition)
    varying = [each for each in conditions if varies.get(each, True)]
    if len(varying) != 1 or not isinstance(varying[0], Op) or varying[0].name != "eq":
        return total
    loop = body.reduction[0]
    for position, at in (varying[0].args, varying[0].args[::-1]):
        if isinstance(position, Index) and position.expr == loop.symbol and not varies.get(at, True):
            at = cast(at, torch.int64)  # a narrower dtype may not hold the size
            inside = op("logical_and", op("ge", at, Constant(0, at.dtype)), op("lt", at, Index(loop.size)))
            for other in conditions:
                inside = inside if other is varying[0] else op("logical_and", inside, other)
            found = _product(op("where", inside, there, elsewhere), factors)
            if not factors or not total.dtype.is_floating_point:
                return found
            if not loop.size.is_Integer or loop.size < 2:
                return total
            return op("add", found, _product(elsewhere, factors))  # NaN if the others are, as 0 * inf
    return total


def _conjuncts(condition: Value) -> list[Value]:
    """Return the conditions that are all true where `condition` is."""
    if isinstance(condition, Op) and condition.name in ("logical_and", "bitwise_and"):
        return [each for arg in condition.args for each in _conjuncts(arg)]
    return [condition]


def _product(value: Value, factors: Sequence[Value]) -> Value:
    for factor in reversed(factors):  # in the original order, for equal bits
        value = op("mul", value, factor)
    return value


def _without_reduction(body: Body) -> Body:
    """Return an element-wise body if no reduction is left and every store runs for each element of the row."""
    symbols = {loop.symbol for loop in body.reduction}
    if not symbols or any(isinstance(value, Reduce | Scan) for value in body.values()):
        return body
    if any(store.index.free_symbols.isdisjoint(symbols) or store.mode != "set" for store in body.stores):
        return body
    count = len(body.loops)
    inner = tuple(Loop(loop_symbol("p", count + at), loop.size) for at, loop in enumerate(body.reduction))
    renamed: dict[sympy.Symbol, sympy.Expr] = {
        old.symbol: new.symbol for old, new in zip(body.reduction, inner, strict=True)
    }
    return canonical(with_loops(body, renamed, (*body.loops, *inner), ()))
