"""Tilings that autotuning measures beside the heuristic one: other block sizes, warps, splits and forms.

They use the axes that `tiling.choose` found. Every tiling is correct; measurement decides which is fastest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import sympy

from overlapc.codegen.triton import products
from overlapc.codegen.triton.tiling import MULTIPROCESSORS, Tiling, hint_of, power_of_two
from overlapc.ir.body import Body
from overlapc.ir.indexing import free_symbols, numel

MOST = 16  # tilings per kernel: compiling one takes half a second of a core, measuring it 20 ms of the device
_LANES = 32  # threads of a warp
_MOST_WARPS = 32
_PIECES = ((1024, 4), (2048, 8), (4096, 8))  # (elements of a row in one tile, warps) of looped reductions
_LEAST_ROW = 2048  # elements; a loop does not pay for shorter rows
_LONGEST_TILE = 65536  # most elements of a row as one tile: 64 per thread at 32 warps
# Columns, rows, layers and warps of a tile over three dims.
_CUBES = (
    (16, 16, 16, 8), (16, 16, 32, 16), (32, 16, 16, 8), (16, 32, 16, 8), (32, 16, 32, 16), (16, 32, 32, 16),
    (32, 32, 16, 16), (16, 16, 64, 16),
)  # fmt: skip
# Columns, rows and warps of a tile that transposes a matrix.
_TILES = ((64, 64, 8), (64, 64, 4), (32, 32, 2), (32, 32, 4), (64, 32, 4), (32, 64, 4), (128, 32, 8), (32, 128, 8))


def alternatives(body: Body, hints: Mapping[sympy.Symbol, int], chosen: Tiling) -> list[Tiling]:
    """Return `chosen`, then other distinct tilings, the most promising first, at most MOST in all."""
    found = {
        "flat": _pointwise,
        "rows": _pointwise,
        "tiled": _tiled,
        "persistent": _reduction,
        "looped": _reduction,
        "split": _reduction,
        "totals": _totals,
        "dot": _products,
    }[chosen.form](body, hints, chosen)
    return list(dict.fromkeys((chosen, *found)))[:MOST]


def _pointwise(body: Body, hints: Mapping[sympy.Symbol, int], chosen: Tiling) -> Iterator[Tiling]:
    last = chosen.x[-1:]
    length = hint_of(numel(loop.size for loop in last), hints)
    if chosen.form == "rows":
        loops = (*chosen.grid, *chosen.x)
        yield from (Tiling("flat", loops, block, block // 256) for block in (1024, 2048))
    elif len(chosen.x) > 1 and length >= 256:
        block = min(1024, power_of_two(length))
        yield Tiling("rows", last, block, max(1, block // 256), grid=chosen.x[:-1])
    for block in (chosen.xblock, 2 * chosen.xblock, chosen.xblock // 2, 4 * chosen.xblock):
        for per_thread in (8, 4, 16):  # elements per thread
            warps = block // (_LANES * per_thread)
            if 1 <= warps <= 16:
                yield replace(chosen, xblock=block, num_warps=warps)


def _tiled(body: Body, hints: Mapping[sympy.Symbol, int], chosen: Tiling) -> Iterator[Tiling]:
    if chosen.z:
        for xblock, yblock, zblock, warps in _CUBES:
            yield replace(chosen, xblock=xblock, yblock=yblock, zblock=zblock, num_warps=warps)
    across, down = (power_of_two(hint_of(numel(loop.size for loop in axis), hints)) for axis in (chosen.x, chosen.y))
    for xblock, yblock, warps in _TILES:
        if xblock <= across and yblock <= down:
            flat = replace(chosen, z=(), zblock=1, grid=(*chosen.grid, *chosen.z))
            yield replace(flat, xblock=xblock, yblock=yblock, num_warps=warps)


def _reduction(body: Body, hints: Mapping[sympy.Symbol, int], chosen: Tiling) -> Iterator[Tiling]:
    """Yield more and fewer warps, rows and columns; then a row as one tile, in pieces, or split among programs."""
    rows, length = (hint_of(numel(loop.size for loop in axis), hints) for axis in (chosen.x, chosen.r))
    if chosen.form == "persistent":
        yield from _warps(chosen)
        for factor in (0.5, 2, 4):
            yield from _with_rows(chosen, factor, rows)
        if length >= _LEAST_ROW:
            yield from (_form(chosen, "looped", block, warps) for block, warps in _PIECES if 2 * block <= length)
        return
    yield from _stages(chosen)
    yield from _warps(chosen)
    for factor in (2, 0.5, 4):
        rblock = int(chosen.rblock * factor)
        if 1 <= rblock <= power_of_two(length) and chosen.xblock * rblock <= _LONGEST_TILE:
            other = replace(chosen, rblock=rblock)
            yield from _warps(other, (1, factor) if factor == 2 else (factor,))
    if chosen.xblock == 1:
        yield from _whole(chosen, length)
    else:  # a reduction of columns, whose tiles are as wide as a warp
        for factor in (2, 0.5):
            xblock = int(chosen.xblock * factor)
            if 8 <= xblock <= 2 * power_of_two(rows):
                yield replace(chosen, xblock=xblock, rblock=max(1, int(chosen.rblock / factor)))
    if chosen.form == "split":
        yield from (chosen.with_splits(splits) for splits in (2 * chosen.splits, chosen.splits // 2) if splits >= 2)
        yield _form(chosen, "looped", chosen.rblock, chosen.num_warps)
    elif rows < 4 * MULTIPROCESSORS and length >= 4 * chosen.rblock:
        yield from (replace(chosen, form="split", splits=splits) for splits in (2, 4))


def _whole(chosen: Tiling, length: int) -> Iterator[Tiling]:
    """Yield tilings with the row as one tile, if that is possible."""
    static = not free_symbols(loop.size for loop in chosen.r)
    if static and chosen.form == "looped" and power_of_two(length) <= _LONGEST_TILE:
        yield from (_form(chosen, "persistent", power_of_two(length), warps) for warps in (16, 32))


def _totals(body: Body, hints: Mapping[sympy.Symbol, int], chosen: Tiling) -> Iterator[Tiling]:
    yield from _stages(chosen)
    yield from _warps(chosen)
    rows = hint_of(numel(loop.size for loop in chosen.x), hints)
    for factor in (2, 0.5):
        yield from _with_rows(chosen, factor, rows)
    for splits in (2 * chosen.splits, chosen.splits // 2):
        if splits >= 1:
            yield chosen.with_splits(splits)
            yield from _warps(chosen.with_splits(splits), (0.5,))


def _products(body: Body, hints: Mapping[sympy.Symbol, int], chosen: Tiling) -> Iterator[Tiling]:
    yield from products.candidates(body, hints)


def _stages(tiling: Tiling) -> Iterator[Tiling]:
    """Yield more and fewer pipeline stages; with 0 stages a tile is loaded when it is needed."""
    others = (0, 2, 3, 4) if tiling.num_stages else (3,)
    yield from (replace(tiling, num_stages=stages) for stages in others if stages != tiling.num_stages)


def _warps(tiling: Tiling, factors: tuple[float, ...] = (2, 0.5)) -> Iterator[Tiling]:
    """Yield the same tile with more or fewer warps."""
    for factor in factors:
        other = replace(tiling, num_warps=min(_MOST_WARPS, int(tiling.num_warps * factor)))
        if other.num_warps >= 1 and _fits(other):
            yield other


def _fits(tiling: Tiling) -> bool:
    """Whether a thread has at least one element, and no more than its registers can hold."""
    return 1 <= tiling.xblock * tiling.rblock / (_LANES * tiling.num_warps) <= 128


def _with_rows(tiling: Tiling, factor: float, rows: int) -> Iterator[Tiling]:
    """Yield tiles with `factor` times as many rows, with the same warps and with `factor` times as many warps."""
    xblock = int(tiling.xblock * factor)
    if 1 <= xblock <= power_of_two(rows) and xblock * tiling.rblock <= 32768:
        other = replace(tiling, xblock=xblock)
        yield from (other, *_warps(other, (factor,)))


def _form(tiling: Tiling, form: str, rblock: int, warps: int) -> Tiling:
    """Return a tiling of another form over the same axes; a change from or to "persistent" has one row per tile."""
    xblock = 1 if form == "persistent" or tiling.form == "persistent" else tiling.xblock
    return Tiling(form, tiling.x, xblock, warps, r=tiling.r, rblock=rblock)
