"""How a body's loops become C++ loops: which is vectorized, which run on threads, which are tiled.

Three shapes come out:

* pointwise: all loops parallel, the one with most contiguous accesses innermost; where another loop is contiguous for
  some access (a transpose), both are blocked so that cache lines are used whole;
* rows: a reduction loop is innermost and vectorized; several short rows go through each pass together, so that what
  is computed once a row (a square root, a division) is vectorized over them, and one row's sum need not wait for
  another's;
* columns: a parallel loop is innermost and vectorized; a tile of it keeps its accumulators in a small array.

Where something is scanned, the reduction loops keep their order (scans.py goes through a row by blocks). Where stores
total columns, chunks of rows run on threads, and each keeps totals of its own.

Where a reduction has few parallel iterations, its passes are *split*: a fixed number of chunks run on threads and are
combined in order, so that results do not depend on the number of threads.
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

# Additions below which waking threads costs more than it saves: about 10 us of work (torch uses the same number).
PARALLEL_WORK = 32768
# Elements of the vector loop that one thread takes at a time: 8 KiB of float32, and a multiple of every vector, so
# that where vectors start does not depend on the number of threads.
BLOCK = 2048
# Of the loop around the vector loop, and of that. With rows a power of two apart only 12 lines of a cache set are left:
# (32, 64) took 4 times as long as this on a 2048 x 2048 float32 transpose (two cores of a Zen 5).
TRANSPOSE_BLOCK = (32, 16)
# The same where blocks are turned round in registers: bytes read of each row (the line that comes anyway), rows, and
# blocks one after another that read on in the same rows: pages, and lines that come in pairs, are then still at hand.
TILED_BYTES, TILED_COLUMNS, TILED_STRIPE = 64, 128, 4
CONFLICT_BLOCK = 64  # of the vector loop when it is the only one that may run on threads
TILE = 128  # columns that accumulate at a time: 512 B of float32 from each row
ROWS = 16  # short rows that go through a pass together
SHORT_ROW = 1024  # elements; with a tile of them the next pass still finds its data in the nearest cache
# Terms that are kept and then added up, where more are faster added as they come: 4096 sums of 64 squares take 12 us so
# and 36 us otherwise, 512 sums of 512 take 7 and 11, 256 of 1024 take 11 and 9 (GCC 12, Zen 5).
SHORT_SUM = 512
FEWEST_ROWS = 4  # that are worth a tile
FEWEST_TILES = 8  # below this many tiles of rows, threads would idle
# At most, of a split reduction or of the rows that columns are totalled over: enough for the threads of a large host.
# How many depends on sizes alone, so that results do too.
CHUNKS = 64
CHUNK_ROWS = 32  # at least, where a chunk has a row of totals: starting and adding that up costs about four rows
FEW_ITERATIONS = 8  # parallel iterations below which a long reduction is split
UNKNOWN_SIZE = 512  # a symbolic size without a hint


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Loops by role; every loop of the body is in exactly one of them."""

    outer: tuple[Loop, ...]  # parallel loops that may run on threads, outermost first
    serial: tuple[Loop, ...]  # parallel loops whose iterations may write the same element
    reduction: tuple[Loop, ...]  # reduction loops, without the vector loop
    vector: Loop | None  # innermost; None only when there is no loop
    columns: bool  # the vector loop is a parallel loop around reductions
    rows: Loop | None  # the parallel loop of which `ROWS` iterations go through each pass together
    blocked: Loop | None  # the loop around the vector loop, blocked together with it
    split: Loop | None  # the reduction loop whose chunks run on threads
    simd: bool  # iterations of the vector loop may run side by side
    threads: bool  # anything may run on threads
    work_per_iteration: int  # additions in one innermost iteration


def plan(body: Body, size_hints: Mapping[str, int] | None = None) -> LoopPlan:
    """The loop structure for `body`; deterministic in the body and the hints."""
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
    """The innermost parallel loop of several iterations, where rows are short and there are many of them."""
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
    """Into how many chunks of at least `least` iterations a loop of `size` is split."""
    if size.is_Integer:
        return sympy.Integer(max(1, min(CHUNKS, int(size) // least)))
    return Max(1, Min(CHUNKS, FloorDiv(size, least)))


def size_hint(size: sympy.Expr, hints: Mapping[str, int]) -> int:
    """`size` with hints for its symbols."""
    if size.is_Integer:
        return int(size)
    known = {symbol: hints.get(str(symbol), UNKNOWN_SIZE) for symbol in size.free_symbols}
    return int(size.subs(known))


@dataclass(frozen=True, slots=True)
class _Access:
    """One load or store, with the stride of every loop: None where it is not a constant."""

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
        everywhere = all(step != 0 for step in strides.values())
        result.append(_Access(strides, cost if everywhere else cost / 8))  # the rest is read less often
    return result


@lru_cache(100_000)
def stride(index: sympy.Expr, symbol: sympy.Symbol) -> sympy.Expr | None:
    """The difference of `index` when `symbol` grows by one; None if it is not constant."""
    if symbol not in index.free_symbols:
        return sympy.S.Zero
    step = sympy.expand(index.xreplace({symbol: symbol + 1}) - index)
    return None if symbol in step.free_symbols else step


def symbols_read(values: Iterable[Value]) -> dict[Value, frozenset[sympy.Symbol]]:
    """Every symbol that each value depends on, its own and its operands' (a Reduce included)."""
    reads: dict[Value, frozenset[sympy.Symbol]] = {}
    for value in values:
        own = frozenset(symbol for expr in value.indices() for symbol in expr.free_symbols)
        reads[value] = own.union(*(reads[operand] for operand in value.operands()))
    return reads


def _vector_loop(
    loops: tuple[Loop, ...], accesses: list[_Access], hints: Mapping[str, int], prefer: set[sympy.Symbol]
) -> Loop | None:
    """The loop along which most accesses are contiguous; of equal ones the innermost that threads may share."""
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
    """The loop that is contiguous where the vector loop strides, when both are long enough to block."""
    for loop in reversed(loops):
        if loop == vector or min(size_hint(loop.size, hints), size_hint(vector.size, hints)) < 16:
            continue
        if any(access.strides[loop.symbol] == 1 and access.strides[vector.symbol] not in (0, 1) for access in accesses):
            return loop
    return None


def _writes_apart(body: Body, loop: Loop) -> bool:
    """Whether different iterations of `loop` write different elements, as far as it matters.

    It matters for stores that add, and for those whose place is read from memory: on threads their order would
    decide the result.
    """
    return all(_digit(store.index, loop, body) for store in body.stores if store.is_atomic or store.indirect)


def _digit(index: sympy.Expr, loop: Loop, body: Body) -> bool:
    """Whether `loop` is a digit of `index` of its own, as p1 is in `4096*i0 + p1` with p1 < 4096."""
    step = stride(index, loop.symbol)
    if step is None or step == 0 or not step.is_positive:
        return False
    sizes = {other.symbol: other.size for other in (*body.loops, *body.reduction)}
    above = sympy.expand(step * loop.size)
    below = sympy.S.Zero  # the most that smaller digits add
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
