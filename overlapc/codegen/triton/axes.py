"""Writes the axes of a tile in Triton: the tile that a program computes, index variables, masks and loops over r."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

import sympy

from overlapc.codegen.triton.shape import KernelShape, axis_symbol, term
from overlapc.ir.body import Loop
from overlapc.ir.indexing import ModularIndexing, exact_quotient

FIRST = "first"  # variable: first index of the program's tile in a kernel of one axis that draws random numbers


class Scope:
    """Appends lines to a function at one indentation."""

    def __init__(self, lines: list[str], depth: int) -> None:
        self.lines = lines
        self.depth = depth

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def inner(self) -> Scope:
        return Scope(self.lines, self.depth + 1)


class AxisWriter:
    """Writes the axes of one function: index variables, masks and the variables of loop symbols."""

    def __init__(self, kernel: KernelShape) -> None:
        self.kernel = kernel
        self.lines: list[str] = []
        self.top = Scope(self.lines, 1)
        self.symbols: dict[sympy.Symbol, str] = {}  # loop symbols of open axes -> variables
        self.masks: dict[str, str] = {}  # axis -> variable of its mask
        self.pair_masks: dict[str, str] = {}  # axis -> variable of its mask for tiles of twice the length

    def program_axes(self, split: bool) -> None:
        """Write which tile this program computes. split: r is divided among programs."""
        kernel, emit = self.kernel, self.top
        self.sizes_as_indices()
        program = kernel.widened(kernel.program)
        tiling = kernel.tiling
        if split:
            emit(f"program = {program}")
            emit("split = program % SPLITS")
            self.axis("x", "program // SPLITS", emit)
        elif tiling.y or tiling.grid:
            emit(f"program = {program}")
            for axis in reversed(kernel.tile_axes):
                blocks = f"(({kernel.size_text(kernel.numel[axis])} + {axis.upper()}BLOCK - 1) // {axis.upper()}BLOCK)"
                self.axis(axis, f"program % {blocks}", emit)
                emit(f"program = program // {blocks}")
            self.fixed_loops("program")
        else:
            self.axis("x", program, emit)

    def sizes_as_indices(self) -> None:
        """Convert sizes to the index dtype of this launch."""
        if self.kernel.index_dtype == "INDEX":
            for size in self.kernel.sizes:
                self.top(f"{size} = {size}.to(INDEX)")

    def fixed_loops(self, number: str) -> None:
        """Define the loop symbols that are constant in a program, from `number`, the variable of their iteration."""
        kernel, emit = self.kernel, self.top
        grid = kernel.tiling.grid
        for loop in reversed(grid):
            if loop is grid[0]:
                emit(f"{loop.symbol} = {number}")
            else:
                emit(f"{loop.symbol} = {number} % {kernel.size_text(loop.size)}")
                emit(f"{number} = {number} // {kernel.size_text(loop.size)}")
            self.symbols[loop.symbol] = str(loop.symbol)

    def axis(self, axis: str, tile: str, emit: Scope) -> None:
        """Define the index variable, mask and loop symbols of tile number `tile` along `axis`."""
        block = f"{axis.upper()}BLOCK"
        if tile == "0":
            self.axis_index(axis, self.kernel.widened(f"tl.arange(0, {block})"), emit)
            return
        first = f"{f'({tile})' if ' ' in tile else tile} * {block}"
        if self.kernel.draws and self.kernel.tile_axes == (axis,):
            emit(f"{FIRST} = {first}")
            first = FIRST
        self.axis_index(axis, f"{first} + tl.arange(0, {block})", emit)

    def axis_index(self, axis: str, text: str, emit: Scope) -> None:
        """Define the index variable of an axis as `text`: the first index of the tile, if not 0, plus the lanes."""
        kernel = self.kernel
        subscript = kernel.subscript(axis)
        name = kernel.index_name[axis]
        grouped = f"({text})" if subscript and " + " in text else text
        emit(f"{name} = {grouped}{subscript}")
        if kernel.is_masked(axis):
            mask = f"{axis}mask{kernel.suffix}"
            emit(f"{mask} = {name} < {kernel.size_text(kernel.numel[axis])}")
            self.masks[axis] = mask
            neighbours = kernel.neighbours_read(axis)
            if neighbours is not None:
                emit(f"{name} = tl.max_contiguous({name}, {neighbours})")
        first, _, lanes = text.rpartition(" + ")
        if axis in kernel.axes_of_pairs:
            self.pair_index(axis, first, lanes, emit)
        loops = kernel.axes[axis]
        if len(loops) == 1:
            self.symbols[loops[0].symbol] = name
            return
        used = self.symbols_needed(axis)
        step = sympy.S.One
        for position in range(len(loops) - 1, -1, -1):
            loop = loops[position]
            if loop.symbol in used:
                flat = term(first) if loop.symbol in kernel.constant_in_tiles else name
                text = flat if step == 1 else f"{flat} // {kernel.size_text(step)}"
                if position > 0:
                    text = f"{text if step == 1 else f'({text})'} % {kernel.size_text(loop.size)}"
                part = f"{loop.symbol}{kernel.suffix}"
                emit(f"{part} = {text}")
                self.symbols[loop.symbol] = part
            step = sympy.expand(step * loop.size)

    def pair_index(self, axis: str, first: str, lanes: str, emit: Scope) -> None:
        """Define the index variable and the mask of tiles that hold two elements per iteration of `axis`."""
        kernel = self.kernel
        lanes = lanes.replace("tl.arange(0, ", "tl.arange(0, 2 * ")
        name = kernel.pair_name(axis)
        emit(f"{name} = ({f'2 * ({first}) + ' if first else ''}{lanes}){kernel.subscript(axis)}")
        if axis in self.masks:
            self.pair_masks[axis] = f"{axis}mask_of_pairs"
            emit(f"{self.pair_masks[axis]} = {name} < {kernel.size_text(2 * kernel.numel[axis])}")

    def symbols_needed(self, axis: str) -> set[sympy.Symbol]:
        """Return the loops of an axis that occur in an index other than as part of the flattened axis."""
        body = self.kernel.body
        exprs = [expr for value in body.values() for expr in value.indices()] + [store.index for store in body.stores]
        used: set[sympy.Symbol] = set()
        for expr in exprs:
            used |= self.flattened(expr).free_symbols
        return used & {loop.symbol for loop in self.kernel.axes[axis]}

    def flattened(self, expr: sympy.Expr) -> sympy.Expr:
        """Replace the loops of whole axes in `expr` by the flat axis: 4096*p0 + p1 -> x, p1//64 % 2 -> x//64 % 2."""
        for axis, loops in self.kernel.axes.items():
            if len(loops) < 2:
                continue
            if expr.has(ModularIndexing):
                expr = expr.replace(ModularIndexing, partial(_of_flat, axis_symbol(axis), loops))
            if not expr.free_symbols.issuperset(loop.symbol for loop in loops):
                continue
            flat, step = sympy.S.Zero, sympy.S.One
            for loop in reversed(loops):
                flat += step * loop.symbol
                step = sympy.expand(step * loop.size)
            scale = sympy.expand(expr).coeff(loops[-1].symbol)
            if scale == 0 or not scale.is_Integer:
                continue
            rest = sympy.expand(expr - scale * flat)
            if rest.free_symbols.isdisjoint(loop.symbol for loop in loops):
                expr = rest + scale * axis_symbol(axis)
        return expr

    def share(self) -> tuple[str, str]:
        """Return the begin and end of r for this program; every program gets the same number of whole tiles."""
        size = self.kernel.size_text(self.kernel.numel["r"])
        self.top(f"share = ({size} + SPLITS * RBLOCK - 1) // (SPLITS * RBLOCK) * RBLOCK")
        return "split * share", f"tl.minimum(split * share + share, {size})"

    def steps(self, first: str, last: str, step: str) -> str:
        """Return the range of a loop; a pipelined loop loads tiles into shared memory in advance."""
        bounds, stages = f"{first}, {last}, {step}", self.kernel.tiling.num_stages
        return f"ops.pipelined({bounds}, num_stages={stages})" if stages else f"range({bounds})"

    def open_loop(self, first: str, last: str) -> Scope:
        self.top(f"for r_start in {self.steps(first, last, 'RBLOCK')}:")
        scope = self.top.inner()
        self.axis_index("r", f"r_start + {self.kernel.widened('tl.arange(0, RBLOCK)')}", scope)
        return scope

    def close_axis(self, axis: str) -> None:
        """Remove the names of an axis after the loop over its tiles."""
        for loop in self.kernel.axes[axis]:
            self.symbols.pop(loop.symbol, None)
        self.masks.pop(axis, None)
        self.pair_masks.pop(axis, None)

    def mask_argument(self, axes: Iterable[str], condition: str | None = None, pairs_along: str = "") -> str:
        """Return `, mask` for an access over `axes`: the masks of axes that may exceed their size, and a condition."""
        wanted = set(axes)
        masks = [
            self.pair_masks[axis] if axis == pairs_along else mask
            for axis, mask in self.masks.items()
            if axis in wanted
        ]
        if condition is not None:
            masks.append(condition)
        return f", {' & '.join(masks)}" if masks else ""


def _of_flat(
    flat: sympy.Symbol, loops: Sequence[Loop], base: sympy.Expr, divisor: sympy.Expr, modulus: sympy.Expr
) -> sympy.Expr:
    """Return `base // divisor % modulus`, by the flat axis if `base` is one of its loops and wraps in step with it."""
    step = sympy.S.One
    for loop in reversed(loops):
        if loop.symbol == base and exact_quotient(loop.size, divisor * modulus) is not None:
            return ModularIndexing(flat, step * divisor, modulus)
        step *= loop.size
    return ModularIndexing(base, divisor, modulus)
