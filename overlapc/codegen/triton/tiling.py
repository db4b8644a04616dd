"""Chooses the loops that form a tile's axes, and the sizes of tiles.

Forms of a kernel:

    flat        pointwise; all loops are flattened into one axis x
    rows        pointwise; the last loop is the axis x, and all others are constant in a program, as are loads that do
                not vary along x (an embedding's token)
    tiled       pointwise; two loops are the axes y and x, for bodies that read along one and write along the other, or
                three are z, y and x, if there are accesses that are contiguous along each
    persistent  reduction whose row fits a tile [x, r]: everything is read once
    looped      reduction in tiles [x, r] over r, with one pass per reduction depth
    dot         matrix product in tiles [y, x], over r; y and x are the loops with which only one factor varies
    split       looped, with r divided among programs, for too few rows to fill the device
    totals      persistent, with the rows divided among programs, each of which totals the columns of its rows

For symbolic sizes, hints are used. They affect only speed: a kernel is correct for all sizes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from overlapc.codegen.triton.accumulate import Accumulation
from overlapc.codegen.triton.levels import accumulations
from overlapc.ir.body import Body, Load, Loop, Op, Reduce, Store, depends_on, reduction_depth
from overlapc.ir.indexing import free_symbols

MULTIPROCESSORS = 132  # those of an H100/H200 SXM; on other devices block sizes only fit less well
_PERSISTENT_LIMIT = 32768  # most elements of a row as one tile: 64 per thread at 16 warps
# Most elements of a row as one tile if the row is read only once anyway: a loop over smaller tiles lets more programs
# run on the device.
_ONE_PASS_LIMIT = 8192
# Columns and warps of the launch that adds up the programs' totals: twice a warp's width, for loads of 16 bytes.
TOTALS_COLUMNS = 64
TOTALS_WARPS = 8
_BRANCHING = frozenset(
    "tanh erf erfc sin cos tan asin acos atan sinh cosh asinh acosh atanh lgamma pow atan2 fmod".split()
)
_LONG_ROW = 2**16  # elements; shorter rows of eight programs per multiprocessor fit the L2 cache
_SHORT_ROW = 512  # elements
_SHORT_TOTALED_ROW = 256  # the same where columns are totaled
# Elements of a tile of whole rows that are only read; and of rows that are also stored, if they are not short: smaller
# tiles keep a program's loads, arithmetic and stores from waiting for each other (the backward of Mamba's norm of rows
# of 512: 252 us with 2048, 210 with 1024; one H200). Rows that are only read take half as long again with 1024.
_ROWS_TILE = 2048
_STORED_ROWS_TILE = 1024
# Programs above which those of one pass need few threads each, as many run concurrently (argmax of 2048 rows: 162 us
# with 8 warps, 135 with 4; sums of 128 rows: 28 and 24; one H200).
_MANY_PROGRAMS = 8 * MULTIPROCESSORS
# Values of an element above which a reduction of everything has twice as many threads, each of which may then use only
# half as many registers (focal loss: 147 us, 103 with twice as many; one H200). For simpler ones, as a mean squared
# error, that is 6% slower.
_MANY_VALUES = 16
_MANY_STEPS = 4  # passes above which exchanges between threads, not memory, take the time (a top-k)
_MANY_STEPS_TILE = 1024
# Most elements of a tile of rows that are gathered by index: more programs hide the latency of two loads, one after the
# other (embeddings + LayerNorm of 1024: 20.7 us with 2048, 19.7 with 1024; one H100).
_GATHERED_TILE = 1024
# Stages of pipelined loops, from a sweep on one H200 (benchmarks/triton_tilings.py): two hide little latency, four cost
# more than they gain.
_STAGES = 3
# x, y and z of a tile with three axes: in two-byte formats, one 32-byte sector of the cache along one axis and two
# sectors along the others. In a sweep on one H200 that was faster than one sector along each, and than two along one.
_CUBE = (32, 16, 32)
_CUBE_WARPS = 16
# Most shared memory of a pipelined loop: an H100/H200 has room for two such programs, any device since 2020 for one.
_AHEAD_BYTES = 80 * 1024
# Shared memory above which tiles of columns are halved, so that four programs fit instead of two: the backward of a
# token shift took 80 us instead of 91 (one H200).
_LARGE_AHEAD_BYTES = 64 * 1024
# Elements of a tile: eight per thread, which is 16 bytes per load in two-byte formats.
_FLAT_TILE = 1024
DEFAULT_HINT = 4096  # hint for a size without one


@dataclass(frozen=True, slots=True)
class Tiling:
    """The form of a kernel, its loops by axis (outermost first) and block sizes in elements (powers of two)."""

    form: str
    x: tuple[Loop, ...]
    xblock: int
    num_warps: int
    r: tuple[Loop, ...] = ()
    rblock: int = 1
    y: tuple[Loop, ...] = ()
    yblock: int = 1
    z: tuple[Loop, ...] = ()
    zblock: int = 1
    grid: tuple[Loop, ...] = ()  # loops that are constant in a program
    splits: int = 1
    num_stages: int = 0  # stages of a pipelined loop; 0: Triton's default for products, no pipeline for other kernels

    def with_splits(self, splits: int) -> Tiling:
        """Return this tiling with r, or the rows, divided among another number of programs."""
        return replace(self, splits=splits)


@dataclass(frozen=True, slots=True)
class Access:
    """One load or store, with its stride along each loop, in elements."""

    strides: Mapping[sympy.Symbol, int]
    bytes: int  # bytes that it touches in the whole kernel
    is_store: bool


def choose(body: Body, hints: Mapping[sympy.Symbol, int]) -> Tiling:
    """Choose form, axes and block sizes for `body`."""
    sizes = {loop.symbol: hint_of(loop.size, hints) for loop in (*body.loops, *body.reduction)}
    accesses = [_access(item, sizes, hints) for item in accesses_of(body)]
    if body.reduction:
        tiling = _reduction(body, sizes, accesses, hints)
    else:
        tiling = _pointwise(body, sizes, accesses)
    placed = Counter((*tiling.grid, *tiling.z, *tiling.y, *tiling.x, *tiling.r))
    assert placed == Counter((*body.loops, *body.reduction)), f"each loop has one place, not as in {tiling}"
    return tiling


def accesses_of(body: Body) -> list[Load | Store]:
    """Return all loads, then all stores."""
    return [*body.loads(), *body.stores]


def hint_of(size: sympy.Expr, hints: Mapping[sympy.Symbol, int]) -> int:
    """Return `size` as a number, with hints for its symbols."""
    if size.is_Integer:
        return int(size)
    known = {symbol: sympy.Integer(hints.get(symbol, DEFAULT_HINT)) for symbol in size.free_symbols}
    return int(size.subs(known))


def _access(item: Load | Store, sizes: Mapping[sympy.Symbol, int], hints: Mapping[sympy.Symbol, int]) -> Access:
    symbols = item.index.free_symbols
    indirect = {symbol for symbol, _ in item.indirect}
    origin = {
        symbol: sympy.Integer(0 if symbol in sizes or symbol in indirect else hints.get(symbol, DEFAULT_HINT))
        for symbol in symbols
    }
    base = item.index.xreplace(origin)
    strides = {
        symbol: int(item.index.xreplace({**origin, symbol: sympy.S.One}) - base)
        for symbol in symbols
        if symbol in sizes
    }
    touched = item.memory_dtype.itemsize
    for symbol in strides:
        touched *= sizes[symbol]
    return Access(strides, touched, isinstance(item, Store))


def _contiguous_bytes(
    accesses: Sequence[Access], sizes: Mapping[sympy.Symbol, int], gap: int = 1
) -> dict[sympy.Symbol, int]:
    """Return the bytes of accesses that have a stride of `gap` along each loop; bytes of stores count for 1/8 more."""
    votes = dict.fromkeys(sizes, 0)
    for access in accesses:
        for symbol, stride in access.strides.items():
            if abs(stride) == gap and sizes[symbol] > 1:
                votes[symbol] += access.bytes + (access.bytes // 8 if access.is_store else 0)
    return votes


def _elements(body: Body) -> int:
    """Return about how many elements of one tensor an iteration stores: several if a loop was split at conditions.

    Elements that a reduction stores once per row, as a top-k does, do not count.
    """
    reduced = {loop.symbol for loop in body.reduction}
    stores = [store for store in body.stores if not reduced or reduced & store.index.free_symbols]
    stored = Counter(store.buffer for store in stores if not store.is_total)
    return power_of_two(max(stored.values(), default=1))


def _in_memory_order(
    loops: tuple[Loop, ...], accesses: Sequence[Access], sizes: Mapping[sympy.Symbol, int]
) -> tuple[Loop, ...]:
    """Return `loops` in the order in which most accessed bytes are in memory, so that adjacent programs read adjacent
    rows; the order changes only if it fits at least twice as many bytes."""
    if len(loops) < 2:
        return loops
    bytes_of: dict[tuple[Loop, ...], int] = {loops: 0}
    for access in accesses:
        if all(access.strides.get(loop.symbol) or sizes[loop.symbol] == 1 for loop in loops):
            order = tuple(sorted(loops, key=lambda loop: -abs(access.strides.get(loop.symbol, 0))))
            bytes_of[order] = bytes_of.get(order, 0) + access.bytes
    best = max(bytes_of, key=lambda order: bytes_of[order])
    return best if bytes_of[best] >= 2 * bytes_of[loops] else loops


def _with_innermost(loops: Sequence[Loop], symbol: sympy.Symbol) -> tuple[Loop, ...]:
    """Return `loops` with the loop of `symbol` innermost."""
    return tuple(sorted(loops, key=lambda loop: loop.symbol == symbol))


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is at least `number`."""
    return 1 << max(0, number - 1).bit_length()


def power_of_two_below(number: int) -> int:
    """Return the largest power of two that is at most `number`; 1 if that is less than 1."""
    return 1 << max(0, number.bit_length() - 1)


def _clamp(low: int, number: int, high: int) -> int:
    return max(low, min(number, high))


def _pointwise(body: Body, sizes: Mapping[sympy.Symbol, int], accesses: Sequence[Access]) -> Tiling:
    votes = _contiguous_bytes(accesses, sizes)
    ranked = sorted(votes, key=lambda symbol: -votes[symbol])
    tiling = _along_several(body, sizes, accesses, {symbol: votes[symbol] for symbol in ranked[:3]})
    if tiling is not None:
        return tiling
    loops = body.loops
    if ranked and votes[ranked[0]] > 0 and loops[-1].symbol != ranked[0] and not votes[loops[-1].symbol]:
        loops = _with_innermost(loops, ranked[0])
    if _has_row_values(body, loops, sizes, accesses):
        # Rows of odd length are loaded one element at a time: four per thread (146 us; 16 per thread: 200; one H200).
        single = sizes[loops[-1].symbol] % 2
        return Tiling("rows", loops[-1:], 512 if single else 1024, 4 if single else 2, grid=loops[:-1])
    # Smaller blocks if few would fill the device.
    total = math.prod(sizes.values())
    xblock = _clamp(128, power_of_two(total // (4 * MULTIPROCESSORS) + 1), _FLAT_TILE)
    xblock = min(xblock, max(32, power_of_two(total)))
    if _elements(body) >= 4:  # fewer iterations per thread, for about as many elements per thread as usual
        return Tiling("flat", loops, min(xblock, 512), _clamp(1, xblock // 64, 8))
    return Tiling("flat", loops, xblock, _clamp(1, xblock // 256, 4))


def _along_several(
    body: Body,
    sizes: Mapping[sympy.Symbol, int],
    accesses: Sequence[Access],
    votes: Mapping[sympy.Symbol, int],
) -> Tiling | None:
    """Return a tiling over two or three axes along which accesses are contiguous; None if flat tiles are better.

    votes: bytes of accesses that are contiguous along loops, most first.
    """
    most = max(votes.values(), default=0)
    axes: list[tuple[Loop, ...]] = []
    short: list[tuple[Loop, ...]] = []
    for symbol, voted in votes.items():
        run = _contiguous_loops(body, symbol, accesses, sizes, min(_CUBE)) if 4 * voted >= most > 0 else ()
        if not any(loop in axis for axis in axes for loop in run):
            (axes if _length(run, sizes) >= min(_CUBE) else short).append(run)
    if not axes:
        return None
    along = axes[0][-1]
    if len(axes) > 1:
        tiling = _tiled(body, axes, sizes)
        return None if _interleaves(axes[1], along, accesses, sizes) and _is_small(tiling, sizes) else tiling
    beside = next((run for run in short if _interleaves(run, along, accesses, sizes)), None)
    if beside is None:
        return None
    tiling = _interleaved(body, along, beside, accesses, sizes)
    return None if _is_small(tiling, sizes) else tiling


def _is_small(tiling: Tiling, sizes: Mapping[sympy.Symbol, int]) -> bool:
    """Whether tiles have few elements. If these are neighbours in memory, flat tiles are faster (copies of images of
    4 x 4 pixels and 4 channels: 320 us in tiles, 39 flat; one H200)."""
    axes = ((tiling.x, tiling.xblock), (tiling.y, tiling.yblock), (tiling.z, tiling.zblock))
    return 4 * math.prod(min(block, _length(loops, sizes)) for loops, block in axes) < 3 * _FLAT_TILE


def _length(loops: Sequence[Loop], sizes: Mapping[sympy.Symbol, int]) -> int:
    return math.prod(sizes[loop.symbol] for loop in loops)


def _contiguous_loops(
    body: Body,
    symbol: sympy.Symbol,
    accesses: Sequence[Access],
    sizes: Mapping[sympy.Symbol, int],
    enough: int,
    other: Sequence[Loop] = (),
) -> tuple[Loop, ...]:
    """Return the loop of `symbol`, and while that has fewer than `enough` elements, the loops around it that continue
    it in memory, up to those of an `other` axis: the channels of a group, then the groups."""
    last = next(at for at, loop in enumerate(body.loops) if loop.symbol == symbol)
    first = last
    along = [access for access in accesses if abs(access.strides.get(symbol, 0)) == 1]
    while first > 0 and (length := _length(body.loops[first : last + 1], sizes)) < enough:
        outer = body.loops[first - 1].symbol
        if body.loops[first - 1] in other or any(abs(access.strides.get(outer, 0)) != length for access in along):
            break
        first -= 1
    return body.loops[first : last + 1]


def _interleaves(
    run: Sequence[Loop], along: Loop, accesses: Sequence[Access], sizes: Mapping[sympy.Symbol, int]
) -> bool:
    """Whether the iterations of `run` are neighbours in memory, as the colors of a pixel, and those of `along` come
    next: the pixels."""
    strides = [access.strides for access in accesses if run and abs(access.strides.get(run[-1].symbol, 0)) == 1]
    return bool(strides) and all(abs(each.get(along.symbol, 0)) == _length(run, sizes) for each in strides)


def _interleaved(
    body: Body, along: Loop, run: tuple[Loop, ...], accesses: Sequence[Access], sizes: Mapping[sympy.Symbol, int]
) -> Tiling:
    """Return a tiling of which y is all of `run`, for accesses that are contiguous along it and then along x."""
    yblock = power_of_two(_length(run, sizes))
    x = _contiguous_loops(body, along.symbol, accesses, sizes, _FLAT_TILE // yblock, run)
    rest = tuple(loop for loop in body.loops if loop not in x and loop not in run)
    xblock = min(_FLAT_TILE // yblock, power_of_two(_length(x, sizes)))
    return Tiling("tiled", x, xblock, _clamp(1, xblock * yblock // 256, 4), y=run, yblock=yblock, grid=rest)


def _tiled(body: Body, axes: Sequence[tuple[Loop, ...]], sizes: Mapping[sympy.Symbol, int]) -> Tiling:
    """Return a tiling over two or three axes, of which the first has the most contiguous bytes."""
    rest = tuple(loop for loop in body.loops if not any(loop in axis for axis in axes))
    if len(axes) == 3:
        x, y, z = axes
        xblock, yblock, zblock = _CUBE
        return Tiling("tiled", x, xblock, _CUBE_WARPS, y=y, yblock=yblock, z=z, zblock=zblock, grid=rest)
    xblock, yblock = (min(64, power_of_two(_length(axis, sizes))) for axis in axes)
    x, y = axes
    return Tiling("tiled", x, xblock, _clamp(1, xblock * yblock // 512, 8), y=y, yblock=yblock, grid=rest)


def _has_row_values(
    body: Body, loops: Sequence[Loop], sizes: Mapping[sympy.Symbol, int], accesses: Sequence[Access]
) -> bool:
    """Whether rows fill blocks of 1024 well, and some load is constant in a row or is the same row for all rows.

    With one row per program, the former is loaded only once and the index of the latter needs no division.
    """
    if len(loops) < 2:
        return False
    last = loops[-1].symbol
    length = sizes[last]
    fits = length >= 1024 and 8 * (-length % 1024) <= length
    rows = {loop.symbol for loop in loops[:-1]}
    if any(abs(access.strides.get(last, 0)) > 1 for access in accesses):
        return False  # strided accesses load one element at a time, and a thread of one row would have many of them
    return fits and any(
        not load.indirect and (last not in load.index.free_symbols or rows.isdisjoint(load.index.free_symbols))
        for load in body.loads()
    )


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Properties from which the tiling of a reduction is chosen. Sizes are hints."""

    body: Body
    x: tuple[Loop, ...]
    r: tuple[Loop, ...]
    rows: int
    length: int
    static: bool  # whether the length is not symbolic
    streams: int  # loads of tensors about as large as all of x and r
    passes: int  # passes that a loop over r would make
    stores: bool  # whether there are stores for every r
    strided: bool  # whether a large tensor is read with gaps between neighbours, as one of interleaved pairs
    states: int  # most state variables per element of a tile in one pass of a loop over r

    @property
    def scans(self) -> bool:
        return self.body.scans()

    @property
    def many_steps(self) -> bool:
        return self.passes > _MANY_STEPS

    def programs(self, xblock: int) -> int:
        """Return the programs that have `xblock` rows each."""
        return max(1, -(-self.rows // xblock))


def _reduction(
    body: Body, sizes: Mapping[sympy.Symbol, int], accesses: Sequence[Access], hints: Mapping[sympy.Symbol, int]
) -> Tiling:
    reduced = {loop.symbol for loop in body.reduction}
    inner = [access for access in accesses if reduced & set(access.strides)]
    gaps = [abs(access.strides[symbol]) for access in inner for symbol in access.strides if sizes[symbol] > 1]
    nearest = min((gap for gap in gaps if gap), default=1)  # 2 if all are interleaved pairs
    votes = _contiguous_bytes(inner, sizes, nearest)
    best = max(votes, key=lambda symbol: votes[symbol]) if votes else None
    rows, length = (math.prod(sizes[loop.symbol] for loop in loops) for loops in (body.loops, body.reduction))
    by_rows = _in_memory_order(body.loops, inner, sizes)
    if any(store.is_total for store in body.stores):
        return _totals(body, by_rows, rows, length, best)
    columns = best is not None and votes[best] > 0 and best not in reduced
    positions = any(isinstance(value, Reduce) and value.kind in ("argmax", "argmin") for value in body.values())
    fixed = positions or body.scans()  # the loops of r must keep their order
    whole = max((access.bytes for access in inner), default=0)
    given = _Reduction(
        body=body,
        x=_with_innermost(body.loops, best) if columns and best is not None else by_rows,
        r=_with_innermost(body.reduction, best) if best in reduced and not fixed else body.reduction,
        rows=rows,
        length=length,
        static=not free_symbols(loop.size for loop in body.reduction),
        streams=sum(4 * access.bytes >= whole and not access.is_store for access in inner),
        passes=_passes(body, reduced),
        states=max((sum(len(accumulation.states) for accumulation in level) for level in _levels(body)), default=0),
        stores=any(access.is_store for access in inner),
        strided=any(
            2 * access.bytes >= whole and not access.is_store and 1 not in map(abs, access.strides.values())
            for access in inner
        ),
    )
    if columns:
        return _whole_columns(given) or _columns(given)
    across = max((loop.symbol for loop in body.loops), key=lambda symbol: votes[symbol], default=None)
    if across is not None and best is not None and not fixed and 4 * votes[across] >= votes[best] > 0:
        given = replace(given, x=_with_innermost(body.loops, across))
        return _whole_columns(given) or _contiguous_both_ways(given)
    row_limit = _row_limit(given.streams)
    if given.passes == 1 or (given.stores and _branches(body)):
        row_limit = min(row_limit, _ONE_PASS_LIMIT)
    return _whole_rows(given) if given.static and length <= row_limit else _looped_rows(given)


def _branches(body: Body) -> bool:
    """Whether a function with branches is computed for every element: 64 elements per thread would spill hundreds of
    registers."""
    varies = depends_on(body.values(), [loop.symbol for loop in body.reduction])
    return any(
        varies[value] and value.name in _BRANCHING and not value.coarse
        for value in body.values()
        if isinstance(value, Op)
    )


def _columns(given: _Reduction) -> Tiling:
    """Return a tiling for accesses that are contiguous along x: a warp's width of columns, and rows to fill a tile."""
    width = 64 if _widest(given.body) <= 2 else 32
    xblock = min(width, power_of_two(given.rows))
    rblock = _clamp(1, power_of_two(given.length), 4096 // xblock)
    tile = xblock * rblock
    warps = _clamp(1, tile // 1024, 16) if given.scans else _warps(tile)  # threads synchronize in each tile
    if given.rows >= xblock * _MANY_PROGRAMS and not given.stores and not given.scans:
        warps = max(1, warps // 2)
    tiling = Tiling("persistent", given.x, xblock, warps, r=given.r, rblock=rblock)
    if given.static and given.length <= rblock:
        if given.scans or given.programs(xblock) < 2 * MULTIPROCESSORS:
            return tiling
        # 64 elements per thread: combining those of several warps takes longer than the loads (a sum of 64 rows: 54 us
        # with 8 warps, 23 with 2; one H200).
        return replace(tiling, num_warps=_clamp(1, power_of_two_below(tile * given.streams // 2048), 16))
    # A pass that also stores is pipelined: otherwise loads would wait for the stores of the previous tile. Elements
    # with gaps between them cannot be copied to shared memory ahead.
    if given.stores and tile == 4096 and _pipelined_bytes(given.body, tile) > _LARGE_AHEAD_BYTES:
        tiling = replace(tiling, rblock=rblock // 2, num_warps=max(1, warps // 2))
        tile //= 2
    stages = _stages(given.body, tile) if given.stores and not given.strided else 0
    # A program with a pipeline has enough loads in flight for a multiprocessor: the gradients of an activation and of
    # its bias (224 programs) took 275 us with rows divided among four, 256 us without (one H100).
    enough = 1 if stages else 2
    # More programs only have more parts to combine: a batch norm's took 125 us with 256 programs, 151 with 1024 (one
    # H200). Without a pipeline, more programs have more loads in flight; in a scan, the threads of one often wait.
    most = 2 if stages and not given.scans else 8
    tiling = replace(tiling, form="looped", num_stages=stages)
    return _split_few_rows(given, tiling, most * MULTIPROCESSORS, enough * MULTIPROCESSORS)


def _row_limit(streams: int) -> int:
    """Return the most elements of a tile of which `streams` tensors are in registers at once."""
    return _PERSISTENT_LIMIT // (1 if streams <= 1 else 2 if streams <= 2 else 4)


def _whole_columns(given: _Reduction) -> Tiling | None:
    """Return a tiling that reads 32 whole columns once, where a loop over r would read them again; None if they do not
    fit in registers (softmax of 150 channels of 33.5 million elements: 85 us in a loop, 58 at once; one H200)."""
    rblock = power_of_two(given.length)
    fits = given.static and given.rows >= 32 and 32 * rblock <= _row_limit(given.streams)
    if not fits or given.passes < 2 or given.scans:
        return None
    # 128 elements per thread if they are of one tensor (softmax of 150 channels, 4.9 million elements: 10.3 us with 32,
    # 6.5 with 128), else 32 of each.
    warps = rblock // (128 if given.streams <= 1 else 32)
    return Tiling("persistent", given.x, 32, _clamp(1, warps, 16), r=given.r, rblock=rblock)


def _contiguous_both_ways(given: _Reduction) -> Tiling:
    """Return a tiling for accesses contiguous along x and along r: whole cache sectors along both."""
    xblock, rblock = (min(size, power_of_two(extent)) for size, extent in ((32, given.rows), (128, given.length)))
    tiling = Tiling("persistent", given.x, xblock, _warps(xblock * rblock), r=given.r, rblock=rblock)
    if given.static and given.length <= rblock:
        return tiling
    return _split_few_rows(given, replace(tiling, form="looped"), 4 * MULTIPROCESSORS)


def _whole_rows(given: _Reduction) -> Tiling:
    rblock = power_of_two(given.length)
    gathers = any(load.indirect for load in given.body.loads())
    # Rows of a length that allows no loads of 16 bytes need an address per element, as if they were long.
    long = rblock >= _SHORT_ROW or given.length % 8 != 0
    halved = long and given.stores and not gathers
    stored = _STORED_ROWS_TILE if halved else _ROWS_TILE
    most = _MANY_STEPS_TILE if given.many_steps else _GATHERED_TILE if gathers else stored
    wanted = max(1, most // (rblock * _elements(given.body)))
    xblock = _clamp(1, min(wanted, power_of_two(max(1, given.rows // (2 * MULTIPROCESSORS)))), 64)
    tile = xblock * rblock * _elements(given.body)
    warps = _warps(tile)
    many_programs = given.programs(xblock) >= 2 * MULTIPROCESSORS
    if many_programs and given.many_steps:
        warps = tile // 128
    elif many_programs:
        # Many programs have enough loads in flight, and fewer threads per row synchronize faster. Elements that only
        # fill a tile need no threads (softmax of rows of 1025: 183 us with two warps, 145 with one; one H200).
        filled = xblock * given.length * _elements(given.body) if long else tile
        per_thread = 16 if halved and tile <= _STORED_ROWS_TILE else 32
        warps = _clamp(1, power_of_two_below(filled // (32 * per_thread)), 8 if tile <= 16384 else 16)
    return Tiling("persistent", given.x, xblock, warps, r=given.r, rblock=rblock)


def _looped_rows(given: _Reduction) -> Tiling:
    rblock = _clamp(64, power_of_two(given.length), 4096 if given.streams <= 2 else 2048)
    warps = _warps(rblock)
    if given.states >= 4:  # many registers per element, as for a mean and a variance
        rblock = max(64, rblock // 2)
    if given.rows == 1 and given.length >= 16 * MULTIPROCESSORS * rblock:  # all elements, which fill the device
        if len(given.body.values()) > _MANY_VALUES:
            rblock, warps = 2 * rblock, 2 * warps
        elif not given.stores:  # eight elements per thread (binary cross-entropy: 70 us with 16, 62 with 8; one H200)
            warps = 2 * warps
    elif given.passes == 1 and given.rows >= _MANY_PROGRAMS:
        rblock, warps = rblock // 2, max(1, warps // 2)
    tiling = Tiling("looped", given.x, 1, warps, r=given.r, rblock=rblock)
    tiling = _split_few_rows(given, tiling, 4 * MULTIPROCESSORS)
    if tiling.form == "split" and given.rows > 1 and given.passes == 1 and given.states < 4 and not given.stores:
        return replace(tiling, rblock=tiling.rblock // 2)  # a Dice loss: 23 us with 16 elements per thread, 19 with 8
    if tiling.form != "looped" or given.passes == 1:
        return tiling
    # The rows of all running programs should still be in the L2 cache when they are read again: for long rows, one
    # program per multiprocessor that uses all its registers; for others, half as many programs as usual.
    if given.length >= _LONG_ROW:
        return replace(tiling, rblock=_LONG_ROW // power_of_two(max(1, given.streams)), num_warps=32)
    if given.length * given.streams >= _LONG_ROW // 2:
        return replace(tiling, rblock=2 * rblock, num_warps=2 * tiling.num_warps)
    return tiling


def _warps(tile: int) -> int:
    """Return the warps for 16 elements per thread: two loads of 16 bytes in flight in two-byte formats."""
    return _clamp(1, tile // 512, 16)


def _split_few_rows(given: _Reduction, tiling: Tiling, most: int, enough: int = 2 * MULTIPROCESSORS) -> Tiling:
    """Return `tiling` with r divided among programs, about `most` at most, if its own programs are not `enough`."""
    programs = given.programs(tiling.xblock)
    if programs >= enough:
        return tiling
    least = (2 if given.scans else 4) * tiling.rblock  # elements per program; tiles of a scan run in order
    wanted = min(most // programs, given.length // least, 512)
    if given.scans:  # the nearest power of two: 8 rows of 128,256 take 20.5 us with 8 programs each, 14.4 with 16
        splits = power_of_two(2 * wanted // 3)
    else:
        splits = power_of_two_below(wanted)
    return replace(tiling, form="split", splits=splits) if splits > 1 else tiling


def _stages(body: Body, tile: int) -> int:
    """Return the stages of a pipelined loop over tiles of `tile` elements; 0 if they do not fit in shared memory."""
    return _STAGES if _pipelined_bytes(body, tile) <= _AHEAD_BYTES else 0


def _pipelined_bytes(body: Body, tile: int) -> int:
    """Return the bytes of shared memory that a pipelined loop over tiles of `tile` elements uses."""
    return (_STAGES - 1) * tile * sum(load.memory_dtype.itemsize for load in _tile_loads(body))


def _tile_loads(body: Body) -> list[Load]:
    """Return the loads of whole tiles, which vary along x and along r."""
    axes = [{loop.symbol for loop in axis} for axis in (body.loops, body.reduction)]
    return [load for load in body.loads() if all(axis & load.index.free_symbols for axis in axes)]


def _widest(body: Body) -> int:
    """Return the bytes of the widest element of a whole tile."""
    return max((load.memory_dtype.itemsize for load in _tile_loads(body)), default=4)


def _levels(body: Body) -> list[list[Accumulation]]:
    """Return the accumulations of a loop over r, by pass."""
    return accumulations(body, True, torch.int32)


def _passes(body: Body, reduced: set[sympy.Symbol]) -> int:
    """Return how often a loop over tiles would read a row: once per reduction depth, and once for stores after them."""
    roots = [value for store in body.stores for value in store.operands()]
    depth = reduction_depth(roots)
    levels = _levels(body)
    after = any(reduced & store.index.free_symbols and depth[store.value] for store in body.stores)
    return len(levels) + after


def _totals(body: Body, x: tuple[Loop, ...], rows: int, length: int, best: sympy.Symbol | None) -> Tiling:
    """Return a tiling with whole rows and as many programs as run concurrently, as each stores a row of totals."""
    rblock = power_of_two(length)
    bytes_each = _widest(body)
    short, ahead = rblock <= _SHORT_TOTALED_ROW, False
    if short:
        # A thread keeps the totals of its elements in registers. One total leaves room for more threads (RMSNorm of
        # heads of 96, backward: 83 us with 32 elements per thread, 67 with 8; one H200), two do not (LayerNorm of 256:
        # 114 and 207).
        tile, per_thread = (2048, 8) if sum(store.is_total for store in body.stores) == 1 else (4096, 32)
    elif length % 8 == 0 or (bytes_each <= 2 and length % 2 == 0):
        # Tiles are loaded ahead, by few threads (RMSNorm of groups of 320: 154 us without loading ahead, 113 with four
        # warps for four rows, 89 with two; LayerNorm of 502: 128 with four, 97 with two).
        tile, per_thread, ahead = 2048, 32 if rblock <= 2048 else 16, True
    else:
        # Single elements of two bytes cannot be loaded ahead, and those of four bytes not faster (LayerNorm of 1283 in
        # float32: 125 us if they are, 91 if not).
        tile, per_thread = 8192 // bytes_each, 16
    xblock = min(max(1, tile // (rblock * _elements(body))), power_of_two(rows))
    elements = xblock * rblock * _elements(body)
    num_warps, stages = _clamp(1, elements // (32 * per_thread), 32), _stages(body, elements) if ahead else 0
    concurrent = MULTIPROCESSORS * (4 if short else max(1, 8192 // elements))
    programs = min(concurrent, -(-rows // xblock))
    r = body.reduction if best is None else _with_innermost(body.reduction, best)
    return Tiling("totals", x, xblock, num_warps, r=r, rblock=rblock, splits=max(1, programs), num_stages=stages)


def memory_dtypes(body: Body) -> dict[str, torch.dtype]:
    """Return the dtype of every buffer; the first one if it is accessed as several (see `TritonGenerator.refuse`)."""
    found: dict[str, torch.dtype] = {}
    for item in accesses_of(body):
        found.setdefault(item.buffer, item.memory_dtype)
    return found
