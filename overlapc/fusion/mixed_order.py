"""Merges a reduction of a matrix's columns into a kernel that runs over its rows: one pass over memory for both.

    for p0 < R, reduce r0 < C:  s = sum(x[C*p0 + r0] * g[C*p0 + r0]);  y[C*p0 + r0] = s * x[C*p0 + r0]
    for p0 < C, reduce r0 < R:  w[p0] = sum(g[C*r0 + p0])
 -> for p0 < R, reduce r0 < C:  s = …;  y[C*p0 + r0] = …;  store sum w[r0] = g[C*p0 + r0]

The gradients of a norm and of its weight are such a pair. An element-wise kernel and a column reduction (the gradients
of an activation and of a bias) need no totals: the reduction visits every element anyway, and also does the stores.

This is tried after all fusions that leave loops unchanged.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import sympy

from overlapc.fusion.loop_order import Bytes, scattered_bytes
from overlapc.fusion.merge import Refusal, merge, merged_once, with_reduction_at
from overlapc.ir.body import LOW_PRECISION, TOTALS, Body, Cast, Loop, Reduce, Store, Value, topological
from overlapc.ir.indexing import loop_symbol, numel
from overlapc.ir.rewriting import with_loops

# Limits from which one pass is faster than two. Below, both passes fit the caches, or there are too few rows to give
# many to every program (or thread), each of which has partial totals of all columns.
FEWEST_ELEMENTS = 5 * 2**20
FEWEST_ROWS = 4096
ROWS_PER_COLUMN = 2
MOST_COLUMNS = 16384  # a program has a total of every column in registers


def crosses(first: Body, second: Body) -> bool:
    """Whether `merge_across` might succeed: a quick necessary test by element counts."""
    if first.reduction and second.reduction:
        return first.numel() == second.reduction_numel() and first.reduction_numel() == second.numel()
    if not first.reduction and not second.reduction:
        return False
    reducing, plain = (first, second) if first.reduction else (second, first)
    return plain.numel() == numel((reducing.numel(), reducing.reduction_numel()))


def merge_across(first: Body, second: Body, hint: Callable[[sympy.Expr], int], bytes_of: Bytes) -> Body | Refusal:
    """Return a kernel that does the work of both, where rows of one are columns of the other; or a refusal.

    hint: evaluates sizes as traced. bytes_of: bytes of a buffer.
    """
    if first.scans() or second.scans():
        return Refusal("a scan keeps the order of its loops")
    if first.reduction and second.reduction:
        pair = _both_reduce(first, second, hint)
        merged: Body | Refusal = pair if isinstance(pair, Refusal) else merge(*pair)
    else:
        merged = _one_reduces(first, second)
    if isinstance(merged, Refusal):
        return merged
    return Refusal("more memory would be read with strides") if skips(merged, first, second, bytes_of) else merged


def skips(merged: Body, first: Body, second: Body, bytes_of: Bytes) -> bool:
    """Whether the merged kernel has more strided memory traffic than its parts.

    That happens if one ran over the rows of a matrix and the other over its columns, with loops of equal sizes.
    """
    return _skipped(merged, bytes_of) > _skipped(first, bytes_of) + _skipped(second, bytes_of)


def _skipped(body: Body, bytes_of: Bytes) -> int:
    """Return the strided bytes along the loop that is contiguous for most bytes."""
    return min((scattered_bytes(body, bytes_of, loop) for loop in (*body.loops, *body.reduction)), default=0)


def _both_reduce(first: Body, second: Body, hint: Callable[[sympy.Expr], int]) -> tuple[Body, Body] | Refusal:
    """Return both bodies over the loops of the row reduction, with the column reduction as totals; or a refusal."""
    flipped = hint(first.numel()) < hint(second.numel())  # columns are fewer than rows
    columns = first if flipped else second
    if not columns.numel().is_Integer:
        return Refusal("the number of columns is known only at run time")
    rows, width = hint(columns.reduction_numel()), int(columns.numel())
    if rows * width < FEWEST_ELEMENTS or rows < max(FEWEST_ROWS, ROWS_PER_COLUMN * width) or width > MOST_COLUMNS:
        return Refusal(f"{rows} rows of {width} elements are too few, too short or too wide for one pass over both")
    totals = _as_totals(columns)
    if isinstance(totals, Refusal):
        return totals
    return (totals, second) if flipped else (first, totals)


def _as_totals(columns: Body) -> Body | Refusal:
    """Return a column reduction that runs row by row, with its reductions as totals of stores; or a refusal."""
    stores = tuple(_as_total(store) for store in columns.stores)
    values = topological(value for store in stores for value in store.operands())
    left = [value.kind for value in values if isinstance(value, Reduce)]
    if left:
        return Refusal(f"the {left[0]} of a column is not a plain total, or more is computed from it")
    loops = tuple(Loop(loop_symbol("p", at), loop.size) for at, loop in enumerate(columns.reduction))
    reduction = tuple(Loop(loop_symbol("r", at), loop.size) for at, loop in enumerate(columns.loops))
    old, new = (*columns.reduction, *columns.loops), (*loops, *reduction)
    replacement = {was.symbol: now.symbol for was, now in zip(old, new, strict=True)}
    return with_loops(dataclasses.replace(columns, stores=stores), replacement, loops, reduction)


def _as_total(store: Store) -> Store:
    """Return `store` as a total, which does the reduction itself; unchanged if that is impossible."""
    value: Value = store.value
    while isinstance(value, Cast) and value.to is store.memory_dtype:
        value = value.arg  # a store rounds anyway
    rounded = None
    if isinstance(value, Cast) and value.to in LOW_PRECISION:  # the gradient of a parameter whose shard is float32
        rounded, value = value.to, value.arg
    plain = store.mode == "set" and store.mask is None and not store.indirect
    if not (isinstance(value, Reduce) and value.kind in TOTALS and plain):
        return store
    arg = value.arg if value.arg.dtype is value.dtype else Cast(value.arg, value.dtype)
    return dataclasses.replace(store, value=arg, mode=value.kind, total_dtype=rounded)


@merged_once
def _one_reduces(first: Body, second: Body) -> Body | Refusal:
    """Return one kernel over the loops of the reduction; or a refusal.

    The element-wise loops run through memory; the reduction may be any of them but the last (which `merge` tries):
    rows (r, p), or rows of every image in a batch (p, r, p). The place with the fewest loads is the one in which both
    read the same elements at the same time.
    """
    reducing, plain = (first, second) if first.reduction else (second, first)
    places = (with_reduction_at(reducing, plain, place) for place in range(len(reducing.loops)))
    merged = [merge(*(pair if first is reducing else reversed(pair))) for pair in places if pair is not None]
    found = min((each for each in merged if isinstance(each, Body)), key=_count_loads, default=None)
    if found is not None and _count_loads(found) < _count_loads(first) + _count_loads(second):
        return found
    refused = [each for each in merged if isinstance(each, Refusal)]
    return refused[0] if refused else Refusal("the rows of one are not the columns of the other")


def _count_loads(body: Body) -> int:
    return len({(load.buffer, load.index) for load in body.loads()})
