"""Chooses the C++ loops for a body: which loop is vectorized, which ones run on threads, which ones are tiled.

There are three loop structures:

* pointwise: all loops are parallel, and the one with most contiguous accesses is innermost. If another loop is
  contiguous for some access (a transpose), both are blocked so that whole cache lines are used.
* rows: a reduction loop is innermost and vectorized. A pass handles several short rows together, so that values
  computed once per row (a square root, a division) are vectorized over rows, and the sums of rows overlap.
* columns: a parallel loop is innermost and vectorized; a tile of it has its accumulators in a small array.

Scans keep the order of the reduction loops (scans.py scans a row in blocks). With stores that total columns, threads
take chunks of rows, and each chunk has totals of its own.

A reduction with few parallel iterations is *split*: a fixed number of chunks run on threads and are combined in order,
so that results do not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import sympy
from torch.utils._sympy.functions import FloorDiv, Max, Min

from overlapc.codegen.cpp.expressions import SCALAR_ONLY, weight
from overlapc.ir.body import Body, Load, Loop, Op, Store, Value
from overlapc.ir.indexing import numel

# Work in additions below which starting threads costs more than it saves: about 10 us (torch uses the same number).
PARALLEL_WORK = 32768
# Elements of the vector loop in one block, the unit of work of a thread: 8 KiB of float32, and a multiple of every
# vector width, so that vectors begin at the same elements for any number of threads.
BLOCK = 2048
# Block sizes of a transpose: of the loop around the vector loop, and of the vector loop. Rows whose distance is a power
# of two share the 12 lines of one cache set: (32, 64) took 4 times as long as this on a 2048 x 2048 float32 transpose
# (two cores of a Zen 5).
TRANSPOSE_BLOCK = (32, 16)
# Sizes of blocks that are transposed in registers: bytes read from each row (a whole cache line), rows, and successive
# blocks that read on in the same rows, so that their pages and adjacent cache lines are used while still cached.
TILED_BYTES, TILED_COLUMNS, TILED_STRIPE = 64, 128, 4
CONFLICT_BLOCK = 64  # block size of the vector loop if it is the only loop that may run on threads
TILE = 128  # columns accumulated at a time: 512 B of float32 from each row
ROWS = 16  # short rows that one pass handles together
SHORT_ROW = 1024  # most elements of a short row; a tile of such rows stays in the nearest cache until the next pass
# Most terms that are stored and then added up: longer rows are faster with a running sum. 4096 sums of 64 squares take
# 12 us stored and 36 us running, 512 sums of 512 take 7 and 11, 256 of 1024 take 11 and 9 (GCC 12, Zen 5).
SHORT_SUM = 512
FEWEST_ROWS = 4  # least rows for a tile
FEWEST_TILES = 8  # least tiles of rows: with fewer, threads would idle
# Most chunks of a split reduction, or of the rows whose columns are totalled: enough for the threads of a large host.
# The number of chunks depends on sizes only, and therefore so do results.
CHUNKS = 64
CHUNK_ROWS = 32  # least rows of a chunk with a row of totals: initializing and adding up totals costs about four rows
FEW_ITERATIONS = 8  # parallel iterations below which a long reduction is split
UNKNOWN_SIZE = 512  # a symbolic size without a hint


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Loops by role. Every loop is in exactly one of `outer`, `serial`, `reduction`, `vector`, `rows` and `blocked`."""

    outer: tuple[Loop, ...]  # parallel loops that may run on threads, outermost first
    serial: tuple[Loop, ...]  # parallel loops whose iterations may write the same element
    reduction: tuple[Loop, ...]  # reduction loops, without the vector loop
    vector: Loop | None  # innermost; None only if there is no loop
    columns: bool  # the vector loop is a parallel loop, with reductions over other loops
    rows: Loop | None  # the parallel loop of which each pass handles `ROWS` iterations together
    blocked: Loop | None  # the loop around the vector loop that is blocked together with it
    split: Loop | None  # the reduction loop whose chunks run on threads
    simd: bool  # iterations of the vector loop may run concurrently
    threads: bool  # some loop may run on threads
    work_per_iteration: int  # additions in one innermost iteration


def plan(body: Body, size_hints: Mapping[str, int] | None = None) -> LoopPlan:
    """Choose the loop structure for `body`; deterministic in the body and the hints."""
    values = body.values()
    accesses = _accesses(body, values)
    hints = dict(size_hints or {})
    loops = (*body.loops, *body.reduction)
    safe = {loop.symbol for loop in body.loops if _writes_apart(body, loop)}
    conflicts = len(safe) < len(body.loops)
    if conflicts and body.reduction:
        safe = set()
    scans = body.scans()
    totals = any(store.is_total for store in body.stores)
    innermost = (*body.loops, *body.reduction[-1:]) if scans else body.reduction if totals else loops
    vector = _vector_loop(innermost, accesses, hints, prefer=safe)
    columns = bool(body.reduction) and vector in body.loops
    blocked = None
    if not body.reduction and not conflicts and vector is not None:
        blocked = _transposed(body.loops, vector, accesses, hints)
    used = {loop.symbol for loop in (vector, blocked) if loop is not None}
    outer = tuple(loop for loop in body.loops if loop.symbol in safe and loop.symbol not in used)
    serial = tuple(loop for loop in body.loops if loop.symbol not in safe and loop.symbol not in used)
    reduction = tuple(loop for loop in body.reduction if loop.symbol not in used)
    work = max(1, sum(map(weight, values)))
    split = None
    if body.reduction and not conflicts and not scans and not totals:
        iterations = size_hint(numel(loop.size for loop in outer), hints)
        width = size_hint(vector.size, hints) if columns and vector is not None else 1
        iterations *= -(-width // TILE)
        long = size_hint(body.reduction_numel(), hints) * min(width, TILE) * work >= PARALLEL_WORK
        if iterations < FEW_ITERATIONS and long:
            split = max(body.reduction, key=lambda loop: size_hint(loop.size, hints))
    rows = None
    if body.reduction and outer and not (columns or split or totals or scans or serial):
        rows = _rows_together(body, outer, hints)
        outer = tuple(loop for loop in outer if loop != rows)
    simd = vector is not None and (vector in body.reduction or vector.symbol in safe)
    simd = simd and not any(isinstance(value, Op) and value.name in SCALAR_ONLY for value in values)
    threads = bool(safe) or split is not None
    return LoopPlan(outer, serial, reduction, vector, columns, rows, blocked, split, simd, threads, work)


def _rows_together(body: Body, outer: tuple[Loop, ...], hints: Mapping[str, int]) -> Loop | None:
    """Return the innermost parallel loop of several iterations if rows are short and there are many, else None."""
    length = body.reduction_numel()
    if not length.is_Integer or int(length) > SHORT_ROW:
        return None
    count = size_hint(numel(loop.size for loop in outer), hints)
    for loop in reversed(outer):
        together = min(ROWS, size_hint(loop.size, hints))
        if together >= FEWEST_ROWS:
            return loop if count >= FEWEST_TILES * together else None
    return None


def chunk_count(size: sympy.Expr, least: int) -> sympy.Expr:
    """Return the number of chunks, of at least `least` iterations each, into which a loop of `size` is split."""
    if size.is_Integer:
        return sympy.Integer(max(1, min(CHUNKS, int(size) // least)))
    return Max(1, Min(CHUNKS, FloorDiv(size, least)))


def size_hint(size: sympy.Expr, hints: Mapping[str, int]) -> int:
    """Return `size` as a number, with hints for its symbols."""
    if size.is_Integer:
        return int(size)
    known = {symbol: hints.get(str(symbol), UNKNOWN_SIZE) for symbol in size.free_symbols}
    return int(size.subs(known))


@dataclass(frozen=True, slots=True)
class _Access:
    """One load or store, with its stride along every loop; None if the stride is not constant."""

    strides: Mapping[sympy.Symbol, sympy.Expr | None]
    cost: float


def _accesses(body: Body, values: Iterable[Value]) -> list[_Access]:
    found: list[tuple[Load | Store, float]] = [(value, 1.0) for value in values if isinstance(value, Load)]
    found += [(store, 1.5) for store in body.stores]
    symbols = [loop.symbol for loop in (*body.loops, *body.reduction)]
    reads = symbols_read(values)
    result = []
    for access, cost in found:
        moving = {symbol for _, value in access.indirect for symbol in reads[value]}
        strides = {symbol: None if symbol in moving else stride(access.index, symbol) for symbol in symbols}
        # An access that does not depend on some loop runs less often.
        everywhere = all(step != 0 for step in strides.values())
        result.append(_Access(strides, cost if everywhere else cost / 8))
    return result


@lru_cache(100_000)
def stride(index: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr | None:
    """Return the difference of `index` when `symbol` grows by one; None if it is not constant."""
    if symbol not in index.free_symbols:
        return sympy.S.Zero
    step = sympy.expand(index.xreplace({symbol: symbol + 1}) - index)
    return None if symbol in step.free_symbols else step


def symbols_read(values: Iterable[Value]) -> dict[Value, frozenset[sympy.Symbol]]:
    """Return all symbols that each value depends on, directly or by its operands (also those that a Reduce reduces)."""
    reads: dict[Value, frozenset[sympy.Symbol]] = {}
    for value in values:
        own = frozenset(symbol for expr in value.indices() for symbol in expr.free_symbols)
        reads[value] = own.union(*(reads[operand] for operand in value.operands()))
    return reads


def _vector_loop(
    loops: tuple[Loop, ...], accesses: list[_Access], hints: Mapping[str, int], prefer: set[sympy.Symbol]
) -> Loop | None:
    """Return the loop along which most accesses are contiguous.

    Ties go to loops in `prefer`, then to inner loops. None if there are no loops.
    """
    best, best_cost = None, 0.0
    for position, loop in enumerate(loops):
        lanes = min(16, max(1, size_hint(loop.size, hints)))
        cost = sum(access.cost * (1 / lanes if access.strides[loop.symbol] in (0, 1) else 1.0) for access in accesses)
        cost -= 1e-3 * (loop.symbol in prefer) + 1e-6 * position
        if best is None or cost < best_cost:
            best, best_cost = loop, cost
    return best


def _transposed(
    loops: tuple[Loop, ...], vector: Loop, accesses: list[_Access], hints: Mapping[str, int]
) -> Loop | None:
    """Return a loop that is contiguous for an access whose stride along the vector loop is larger than 1.

    Both loops must be long enough to be blocked. None if there is no such loop.
    """
    for loop in reversed(loops):
        if loop == vector or min(size_hint(loop.size, hints), size_hint(vector.size, hints)) < 16:
            continue
        if any(access.strides[loop.symbol] == 1 and access.strides[vector.symbol] not in (0, 1) for access in accesses):
            return loop
    return None


def _writes_apart(body: Body, loop: Loop) -> bool:
    """Whether iterations of `loop` write different elements by every atomic store and every indirect store.

    Otherwise the result would depend on the order of threads. Other stores write different elements anyway.
    """
    return all(_digit(store.index, loop, body) for store in body.stores if store.is_atomic or store.indirect)


def _digit(index: sympy.Expr, loop: Loop, body: Body) -> bool:
    """Whether `loop` is a separate digit of `index`, as p1 is in `4096*i0 + p1` with p1 < 4096."""
    step = stride(index, loop.symbol)
    if step is None or step == 0 or not step.is_positive:
        return False
    sizes = {other.symbol: other.size for other in (*body.loops, *body.reduction)}
    above = sympy.expand(step * loop.size)
    below = sympy.S.Zero  # largest sum of the smaller digits
    for term in sympy.Add.make_args(sympy.expand(index - step * loop.symbol)):
        if term == 0 or not (term.free_symbols - set(body.size_symbols())):
            continue
        if sympy.simplify(term / above).is_integer:
            continue
        inner = [symbol for symbol in term.free_symbols if symbol in sizes]
        if len(inner) != 1 or stride(term, inner[0]) is None or not term.is_nonnegative:
            return False
        below += stride(term, inner[0]) * (sizes[inner[0]] - 1)
    return bool((step - below).is_positive)
