"""Rewrites of bodies: changing loops, replacing values, and the canonical form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache

import sympy

from overlapc.ir.body import (
    Body,
    Cast,
    Checked,
    Index,
    Load,
    Loop,
    Op,
    Reduce,
    Scan,
    Value,
    ranges_of,
    topological,
)
from overlapc.ir.indexing import free_symbols, loop_symbol, simplify, substitute


def rebuild(value: Value, operands: tuple[Value, ...], index: Callable[[sympy.Expr], sympy.Expr]) -> Value:
    """Return `value` with new operands (in the order of `operands()`) and with `index` applied to its expressions.

    Return the same object where that changes nothing.
    """
    same = operands == value.operands()
    if isinstance(value, Load):
        at = index(value.index)
        if same and at is value.index:
            return value
        indirect = tuple((symbol, new) for (symbol, _), new in zip(value.indirect, operands, strict=False))
        mask = operands[-1] if value.mask is not None else None
        return Load(value.buffer, at, value.memory_dtype, mask, indirect)
    if isinstance(value, Index):
        at = index(value.expr)
        return value if at is value.expr else Index(at, value.dtype)
    if isinstance(value, Scan):
        return Scan(value.kind, operands[0], value.dtype, index(value.position))
    if same:
        return value
    if isinstance(value, Op):
        return Op(value.name, operands, value.dtype, value.coarse)
    if isinstance(value, Cast):
        return Cast(operands[0], value.to)
    if isinstance(value, Checked):
        return Checked(operands[0], operands[1], value.message)
    if isinstance(value, Reduce):
        return Reduce(value.kind, operands[0], value.dtype)
    return value


def rewrite_values(
    roots: Iterable[Value],
    index: Callable[[sympy.Expr], sympy.Expr] = lambda expr: expr,
    replace: Callable[[Value], Value | None] = lambda value: None,
) -> dict[Value, Value]:
    """Return a mapping from every value under `roots` to its replacement.

    Each value is rebuilt from its new operands, with `index` applied to its expressions. `replace` is called with the
    rebuilt value, and may return another value for it, or None to keep it.
    """
    return _mapped(topological(roots), index, replace)


def _mapped(
    values: Iterable[Value],
    index: Callable[[sympy.Expr], sympy.Expr],
    replace: Callable[[Value], Value | None],
) -> dict[Value, Value]:
    """Do the work of `rewrite_values` for values in topological order."""
    new: dict[Value, Value] = {}
    for value in values:
        built = rebuild(value, tuple([new[operand] for operand in value.operands()]), index)
        other = replace(built)
        new[value] = built if other is None else other
    return new


def rewrite(
    body: Body,
    loops: tuple[Loop, ...],
    reduction: tuple[Loop, ...],
    index: Callable[[sympy.Expr], sympy.Expr] = lambda expr: expr,
    replace: Callable[[Value], Value | None] = lambda value: None,
) -> Body:
    """Return `body` with other loops, and with its values rewritten as in `rewrite_values`."""
    return with_values(body, loops, reduction, _mapped(body.values(), index, replace), index)


def with_values(
    body: Body,
    loops: tuple[Loop, ...],
    reduction: tuple[Loop, ...],
    new: Mapping[Value, Value],
    index: Callable[[sympy.Expr], sympy.Expr] = lambda expr: expr,
) -> Body:
    """Return `body` with other loops, with its values replaced as in `new`, and `index` applied to its stores."""
    stores = tuple(
        dataclasses.replace(
            store,
            index=index(store.index),
            value=new[store.value],
            mask=None if store.mask is None else new[store.mask],
            indirect=tuple((symbol, new[value]) for symbol, value in store.indirect),
        )
        for store in body.stores
    )
    return Body(loops, reduction, stores)


def with_loops(
    body: Body,
    replacement: Mapping[sympy.Symbol, sympy.Expr],
    loops: tuple[Loop, ...],
    reduction: tuple[Loop, ...],
) -> Body:
    """Return `body` with other loops, replacing each old loop symbol by an expression in the new ones."""
    ranges = ranges_of((*loops, *reduction))
    return rewrite(body, loops, reduction, lambda expr: simplify(substitute(expr, replacement), ranges))


def canonical(body: Body) -> Body:
    """Return the canonical form of `body`, in which equal kernels are equal.

    Loops of size 1 are removed, adjacent loops are merged if every index allows it, and loops are named p0… and r0….
    """
    loops, reduction = list(body.loops), list(body.reduction)
    replacement: dict[sympy.Symbol, sympy.Expr] = {}
    for group in (loops, reduction):
        for loop in [loop for loop in group if loop.size == 1]:
            replacement[loop.symbol] = sympy.S.Zero
            group.remove(loop)
    if not reduction and body.reduction:
        reduction = [body.reduction[-1]]  # a reduction over one element keeps its loop, so it stays a reduction
        replacement.pop(body.reduction[-1].symbol, None)
    if replacement:
        body = with_loops(body, replacement, tuple(loops), tuple(reduction))
    exprs = frozenset(expr for value in body.values() for expr in value.indices())
    exprs |= {store.index for store in body.stores}
    renamed: dict[sympy.Symbol, sympy.Expr] = {}
    named: list[tuple[Loop, ...]] = []
    for prefix, group in (("p", loops), ("r", reduction)):
        at = 0
        while at + 1 < len(group):
            merged = _merge(group[at], group[at + 1], exprs)
            if merged is None:
                at += 1
                continue
            renamed[group[at].symbol] = sympy.S.Zero  # the inner loop's symbol now runs over both loops
            group[at + 1], exprs = merged
            del group[at]
        named.append(tuple(Loop(loop_symbol(prefix, at), loop.size) for at, loop in enumerate(group)))
        renamed.update((old.symbol, new.symbol) for old, new in zip(group, named[-1], strict=True))
    if all(old == new for old, new in renamed.items()):
        return Body(named[0], named[1], body.stores)
    return rewrite(body, named[0], named[1], lambda expr: substitute(expr, renamed))


@lru_cache(20_000)
def _merge(outer: Loop, inner: Loop, exprs: frozenset[sympy.Expr]) -> tuple[Loop, frozenset[sympy.Expr]] | None:
    """Merge two loops; None unless every expression depends on `outer * inner.size + inner` only."""
    merged = set()
    for expr in exprs:
        symbols = free_symbols((expr,))
        if outer.symbol not in symbols and inner.symbol not in symbols:
            merged.add(expr)
            continue
        dropped = substitute(expr, {outer.symbol: sympy.S.Zero})
        back = substitute(dropped, {inner.symbol: outer.symbol * inner.size + inner.symbol})
        if sympy.expand(back) != sympy.expand(expr):
            return None
        merged.add(dropped)
    return Loop(inner.symbol, sympy.expand(outer.size * inner.size)), frozenset(merged)


def with_sums(body: Body) -> Body:
    """Return `body` with its matrix products as plain sums, for a generator without tensor cores."""
    if not body.dots():
        return body

    def replace(value: Value) -> Value | None:
        return Reduce("sum", value.arg, value.dtype) if isinstance(value, Reduce) and value.kind == "dot" else None

    return rewrite(body, body.loops, body.reduction, replace=replace)
