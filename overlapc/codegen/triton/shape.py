"""Properties of a kernel that all its stages share: arguments, axes, index widths and tile shapes."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from overlapc.codegen.triton.accumulate import Accumulation
from overlapc.codegen.triton.expressions import IndexPrinter
from overlapc.codegen.triton.levels import accumulations, scanning
from overlapc.codegen.triton.pairs import paired
from overlapc.codegen.triton.tiling import Tiling
from overlapc.ir.body import Body, Load, Op, Scan, Store, Value, depends_on, topological
from overlapc.ir.facts import unseen_where_masked
from overlapc.ir.indexing import ModularIndexing, at_most, bounds, exact_quotient, numel

WIDEST_ACCESS = 8  # elements of two bytes in 16
_INT32_LIMIT = 2**31 - 2**20  # leaves room for the last tile, which may be partly masked


class KernelShape:
    """Properties that all stages of one kernel share: arguments, axes and index arithmetic."""

    def __init__(
        self,
        body: Body,
        tiling: Tiling,
        name: str,
        program: str = "tl.program_id(0)",
        known: tuple[Mapping[sympy.Symbol, int], ...] = (),
        origin: str = "",
    ) -> None:
        """Derive them from `body` and `tiling`.

        program: text of the program's number. known: all sets of values that size symbols will ever have, if known.
        origin: source of the kernel, for messages of checks: of a device assert, the user sees only the message.
        """
        self.program = program
        self.origin = origin
        self.known = known
        self.body = body
        self.tiling = tiling
        self.name = name
        self.ranges = body.ranges()
        self.sizes = tuple(body.size_symbols())
        self.reduced = {loop.symbol for loop in body.reduction}
        self.is_reduction = bool(body.reduction)
        self.arguments = argument_names(body)
        axes = {"z": tiling.z, "y": tiling.y, "x": tiling.x, "r": tiling.r}
        self.axes = {axis: loops for axis, loops in axes.items() if loops or axis == "x"}
        self.numel = {axis: numel(loop.size for loop in loops) for axis, loops in self.axes.items()}
        self.index_name = {axis: str(loops[0].symbol) if len(loops) == 1 else axis for axis, loops in self.axes.items()}
        self.block = {"z": tiling.zblock, "y": tiling.yblock, "x": tiling.xblock, "r": tiling.rblock}
        self.tile_axes = tile_axes(tiling)
        stores = [store for store in body.stores if store.mode == "set"]
        flat = {axis: self.axes[axis] for axis in self.tile_axes if tiling.form != "dot" and len(self.tile_axes) < 3}
        self.load_pairs, self.store_pairs = paired(body.loads(), flat), paired(stores, flat)
        self.axes_of_pairs = {pair.axis for pair in self.load_pairs.values()}
        self.axes_of_pairs |= {pair.axis for pair in self.store_pairs.values()}
        self.suffix = ""  # suffix of index variables if an axis has two of them
        self.index_bounds, self.index_dtype = self._index_width()
        self.constant_in_tiles = self._constant_in_tiles()  # loops
        self.axis_of = {
            loop.symbol: axis
            for axis, loops in self.axes.items()
            for loop in loops
            if loop.symbol not in self.constant_in_tiles
        }
        self.draws = any(isinstance(value, Op) and value.name == "random" for value in body.values())
        self.unseen = unseen_where_masked(body)
        position = torch.int64 if self.index_dtype != "tl.int32" else torch.int32
        joined = tiling.form in ("looped", "split")
        self.lane_width = self._lane_width()
        scans = [value for value in body.values() if isinstance(value, Scan)]
        self.scans = {scan: scanning(scan, number, position) for number, scan in enumerate(scans)}
        self.splits_scans = bool(scans) and tiling.form == "split"
        self.levels: list[list[Accumulation]] = []
        if tiling.form != "dot":
            ahead = self.scans if self.splits_scans else None
            self.levels = accumulations(body, joined, position, self.lane_width, ahead)

    def _constant_in_tiles(self) -> set[sympy.Symbol]:
        """Return the loops that are constant in a tile, as tiles divide the loops inside of them evenly: the batch of a
        tile of channels. What depends on them alone is computed and loaded once."""
        tiling = self.tiling
        # A loop over rows counts them in int32.
        if tiling.form == "dot" or (tiling.form == "totals" and self.index_dtype != "tl.int32"):
            return set()
        found: set[sympy.Symbol] = set()
        for axis in {axis for axis in "zyx" if self.block[axis] > 1} & self.axes.keys() - self.axes_of_pairs:
            inside = sympy.S.One
            for loop in reversed(self.axes[axis]):
                if inside.is_Integer and int(inside) % self.block[axis] == 0:
                    found.add(loop.symbol)
                inside *= loop.size
        return found

    def _lane_width(self) -> int:
        """Return how many neighbours along r a thread holds: 16 bytes' worth if all loads are contiguous along r."""
        tiling = self.tiling
        last = tiling.r[-1].symbol if tiling.r else None
        loads = [load for load in self.body.loads() if last in load.index.free_symbols]
        if not loads or any(load.index.coeff(last) != 1 for load in loads):
            return 1
        most = tiling.xblock * tiling.rblock // (32 * tiling.num_warps)
        return max(1, min(8, most, 16 // min(load.memory_dtype.itemsize for load in loads), tiling.rblock))

    def is_one_a_lane(self, load: Load) -> bool:
        """Whether all neighbours along r that a thread holds load the same element, such as a channel's weight."""
        r = self.tiling.r
        if self.lane_width == 1 or len(r) < 2 or load.operands():
            return False
        used = load.index.free_symbols & self.reduced
        return (
            bool(used)
            and r[-1].symbol not in used
            and exact_quotient(r[-1].size, sympy.Integer(self.lane_width)) is not None
        )

    def _index_width(self) -> tuple[tuple[sympy.Expr, ...], str]:
        """Return the largest magnitudes of indices that depend on symbols, and the dtype of indices.

        "INDEX" is a dtype chosen at launch.
        """
        largest: set[sympy.Expr] = set(self.numel.values())
        divided = {"split": "r", "totals": "x"}.get(self.tiling.form)
        if divided:  # among programs, in whole tiles: up to a tile of each program lies beyond the axis
            largest.add(self.numel[divided] + self.tiling.splits * self.block[divided])
        exprs = [expr for value in self.body.values() for expr in value.indices()]
        unknown = False
        for expr in {part for each in (*exprs, *(store.index for store in self.body.stores)) for part in _exact(each)}:
            found = bounds(expr, self.ranges)
            if found is None:
                unknown = True
                continue
            largest.add(found[1])
            if not at_most(sympy.S.Zero, found[0]):
                largest.add(-found[0])
        if self.known:
            largest = {expr.subs(sizes) for expr in largest for sizes in self.known}
        known = [int(expr) for expr in largest if expr.is_Integer]
        open_ended = tuple(sorted((expr for expr in largest if not expr.is_Integer), key=str))
        if unknown or max(known, default=0) >= _INT32_LIMIT:
            return (), "tl.int64"
        return open_ended, "INDEX" if open_ended else "tl.int32"

    def seen_over(self, axes: tuple[str, ...], suffix: str = "") -> KernelShape:
        """Return this kernel with tiles over other axes, for the factors of a matrix product."""
        other = copy.copy(self)
        other.tile_axes = axes
        other.suffix = suffix
        other.index_name = {axis: f"{name}{suffix}" for axis, name in self.index_name.items()}
        return other

    # Text shared by all stages

    def printer(self, names: Mapping[sympy.Symbol, str]) -> IndexPrinter:
        return IndexPrinter({**{symbol: str(symbol) for symbol in self.sizes}, **names}, self.ranges)

    def size_text(self, expr: sympy.Expr) -> str:
        return self.printer({}).factor(expr)

    def is_masked(self, axis: str) -> bool:
        """Whether the last tile of an axis may extend past the axis's end."""
        sizes = [self.numel[axis].subs(sizes) for sizes in self.known] or [self.numel[axis]]
        return not all(size.is_Integer and size > 0 and int(size) % self.block[axis] == 0 for size in sizes)

    def neighbours_read(self, axis: str) -> str | None:
        """Return how many neighbours along a masked axis one access can cover, for each axis of a tile.

        None if there is no limit. The mask changes within wider accesses; Triton would nevertheless assign eight
        neighbours to a thread and access them one by one, so that a warp's accesses touch eight times as many cache
        lines.
        """
        size = self.numel[axis]
        if not size.is_Integer or int(size) % WIDEST_ACCESS == 0:
            return None
        # If no axis of a tile had neighbours, Triton would assign threads along its first one, with strides in memory
        # (softmax of rows of 49: 473 us, with two neighbours 108; one H200).
        least = 1 if len(self.tile_axes) == 1 else 2
        neighbours = [str(max(least, int(size) & -int(size)) if other == axis else 1) for other in self.tile_axes]
        return neighbours[0] if len(neighbours) == 1 else f"[{', '.join(neighbours)}]"

    def shape(self, axes: Iterable[str]) -> str:
        """Return the tile's shape, with 1 for axes that are not in `axes`."""
        wanted = set(axes)
        return "[" + ", ".join(f"{axis.upper()}BLOCK" if axis in wanted else "1" for axis in self.tile_axes) + "]"

    def pair_name(self, axis: str) -> str:
        """Return the index variable along `axis` of a tile that holds two elements per iteration."""
        return f"{self.index_name[axis]}_pair"

    def subscript(self, axis: str) -> str:
        if len(self.tile_axes) == 1:
            return ""
        return "[" + ", ".join(":" if other == axis else "None" for other in self.tile_axes) + "]"

    def widened(self, text: str) -> str:
        return text if self.index_dtype == "tl.int32" else f"{text}.to({self.index_dtype})"

    def is_inner(self, store: Store, varies: Mapping[Value, bool]) -> bool:
        return bool(self.reduced & store.index.free_symbols) or any(varies[value] for value in store.operands())

    def divided_stores(self) -> tuple[list[Store], list[Store]]:
        """Return the stores that run for every iteration of r, and those that run once per x."""
        varies = depends_on((value for store in self.body.stores for value in store.operands()), self.reduced)
        inner: list[Store] = []
        outer: list[Store] = []
        for store in self.body.stores:
            (inner if self.is_reduction and self.is_inner(store, varies) else outer).append(store)
        return inner, outer

    def totals(self) -> list[Store]:
        """Return the stores that total the columns over all rows."""
        return [store for store in self.body.stores if store.is_total]

    def level_of(self, store: Store) -> int:
        """Return the number of reduction levels that must be finished before `store` can run."""
        provided = {
            value: number
            for number, level in enumerate(self.levels, 1)
            for accumulation in level
            for value in accumulation.provides
        }
        return max((provided.get(value, 0) for value in topological(store.operands())), default=0)

    def describe(self) -> str:
        parts = [f"{axis} {self.numel[axis]} by {self.block[axis]}" for axis in self.tile_axes]
        tail = f", {self.tiling.splits} programs a row" if self.tiling.form == "split" else ""
        tail += f", {self.tiling.splits} programs share the rows" if self.tiling.form == "totals" else ""
        return f"{self.tiling.form}: {', '.join(parts)}, {self.tiling.num_warps} warps{tail}"


def tile_axes(tiling: Tiling) -> tuple[str, ...]:
    """Return the axes with a block size, in the order of a tile's dims; a matrix product's tiles use two of three."""
    if tiling.form == "dot":
        return ("y", "x", "r")
    if tiling.r:
        return ("x", "r")
    return ("z", "y", "x") if tiling.z else ("y", "x") if tiling.y else ("x",)


def term(text: str) -> str:
    """Return `text`, in parentheses if needed, as an operand of a larger expression."""
    return text if text.isidentifier() or text.isdigit() else f"({text})"


def axis_symbol(axis: str) -> sympy.Symbol:
    return sympy.Symbol(f"{axis}_flat", integer=True, nonnegative=True)


def _exact(index: sympy.Expr) -> Iterator[sympy.Expr]:
    """Yield the parts of `index` that are computed in the width of indices and must not wrap around there.

    Sums and products may wrap around on the way to a result that does not; what is divided may not, nor what is added
    to, or multiplied with, an index that was loaded from memory: that is an int64.
    """
    if not any(map(_is_loaded, index.free_symbols)):
        yield index
        for division in index.atoms(FloorDiv, ModularIndexing):
            yield from division.args
    elif isinstance(index, sympy.Add | sympy.Mul):
        narrow = [part for part in index.args if not any(map(_is_loaded, part.free_symbols))]
        for part in {*index.args, index.func(*narrow)}:
            yield from _exact(part)
    else:
        for part in index.args:
            yield from _exact(part)


def _is_loaded(symbol: sympy.Symbol) -> bool:
    return str(symbol)[0] == "i" and str(symbol)[1:].isdecimal()  # as `loop_symbol` names them


def argument_names(body: Body) -> dict[str, str]:
    """Name buffers by first use: in0, in1, … if only read, out0, … if only written, io0, … if both."""
    read = list(dict.fromkeys(load.buffer for load in body.loads()))
    written = list(dict.fromkeys(store.buffer for store in body.stores))
    names: dict[str, str] = {}
    counts = {"in": 0, "out": 0, "io": 0}
    for buffer in (*read, *(name for name in written if name not in read)):
        kind = "io" if buffer in read and buffer in written else "in" if buffer in read else "out"
        names[buffer] = f"{kind}{counts[kind]}"
        counts[kind] += 1
    return names
