"""Transposes blocks in registers for reads whose neighbouring elements are far apart in memory.

   for p0, p1: y[64*p0 + p1] = x[p0 + 100*p1]
-> for each stripe of p0, each block of p1, each block of p0 in the stripe:
       transpose_tile(tile, x + …);  for p0, p1 in the block: y[64*p0 + p1] = tile[p0][p1]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy
import torch

from overlapc.codegen.cpp.expressions import MEMORY_TYPE, index_text
from overlapc.codegen.cpp.loop_plan import TILED_BYTES, TILED_COLUMNS, TILED_STRIPE, stride
from overlapc.codegen.cpp.loops import For, blocks, stripes
from overlapc.ir.body import Body, Load, Loop


@dataclass(frozen=True, slots=True)
class Tiles:
    """The loads that are transposed in tiles, over the two loops that are blocked together."""

    names: Mapping[Load, str]  # name of each load's tile
    blocked: Loop  # each of its iterations is a row of a tile
    vector: Loop

    @property
    def rows(self) -> int:
        """Rows of a tile: as many as a cache line holds of the smallest transposed element."""
        return TILED_BYTES // min(load.memory_dtype.itemsize for load in self.names)

    def place(self, load: Load) -> str:
        """Return the tile's element for the current iteration: `tile3[128 * (p0 - p0_block) + (p1 - p1_block)]`."""
        row, column = (f"({loop.symbol} - {loop.symbol}_block)" for loop in (self.blocked, self.vector))
        return f"{self.names[load]}[{TILED_COLUMNS} * {row} + {column}]"

    def loops(self, arguments: Mapping[str, str]) -> tuple[list[For], For]:
        """Return the parallel loops over stripes and columns, and the loop over a stripe's blocks (fills the tiles)."""
        stripe, block = stripes(self.blocked, self.rows * TILED_STRIPE, self.rows)
        block.inside += self._fill(arguments)
        return [stripe, blocks(self.vector, TILED_COLUMNS)], block

    def _fill(self, arguments: Mapping[str, str]) -> list[str]:
        rows, columns, both = self.rows, TILED_COLUMNS, (self.blocked, self.vector)
        origin = {loop.symbol: sympy.Symbol(f"{loop.symbol}_block", integer=True) for loop in both}
        height, width = (f"{loop.symbol}_end - {loop.symbol}_block" for loop in both)
        lines = []
        for load, tile in self.names.items():
            first = f"{arguments[load.buffer]} + {index_text(load.index.xreplace(origin))}"
            step = index_text(stride(load.index, self.vector.symbol))
            lines.append(f"{MEMORY_TYPE[load.memory_dtype]} {tile}[{rows} * {columns}];")
            lines.append(f"transpose_tile<{rows}, {columns}>({tile}, {first}, {step}, {height}, {width});")
        return lines


def tiles_of(body: Body, blocked: Loop, vector: Loop, memory_dtype: Mapping[str, torch.dtype]) -> Tiles | None:
    """Return the loads that are contiguous along `blocked` and strided along `vector`; None if there are none."""
    names = {}
    for number, load in enumerate(body.loads()):
        across, along = (stride(load.index, loop.symbol) for loop in (vector, blocked))
        always = load.mask is None and not load.indirect
        plain_type = load.memory_dtype == memory_dtype[load.buffer]
        if along == 1 and across not in (None, 0, 1) and always and plain_type:
            names[load] = f"tile{number}"
    return Tiles(names, blocked, vector) if names else None
