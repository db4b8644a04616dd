"""Loop bodies as Triton kernels.

A kernel reads like the body it comes from: axes, then a pass over tiles for every reduction depth, then stores.
See tiling.py for the forms a kernel takes and accumulate.py for how reductions run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from overlapc.codegen.kernel import KernelSource, Launcher, register
from overlapc.codegen.triton import tiling as tilings
from overlapc.codegen.triton.accumulate import Accumulation, Online, Position, accumulations
from overlapc.codegen.triton.expressions import (
    COMPUTE,
    POINTER,
    IndexPrinter,
    as_literal,
    constant_text,
    converted,
    converted_name,
    operation,
    unprintable,
    unsupported,
)
from overlapc.codegen.triton.tiling import Tiling, accesses_of
from overlapc.ir.body import Body, Cast, Checked, Constant, Index, Load, Op, Reduce, Store, Value, depends_on
from overlapc.ir.indexing import bounds, numel
from overlapc.runtime.triton_launch import Launch, Stage, load_kernels

_INT32_LIMIT = 2**31 - 2**20  # room for the last, partly masked tile

_HEADER = """import triton
import triton.language as tl

from overlapc.runtime import triton_prelude as ops
"""


class TritonGenerator:
    """Generates Triton for CUDA devices."""

    device_type = "cuda"

    def refuse(self, body: Body) -> str | None:
        """Why this body cannot be generated, or None."""
        dtypes: dict[str, torch.dtype] = {}
        for item in accesses_of(body):
            if item.memory_dtype not in POINTER:
                return f"no {item.memory_dtype} in Triton kernels"
            if dtypes.setdefault(item.buffer, item.memory_dtype) is not item.memory_dtype:
                return f"{item.buffer} is read as {dtypes[item.buffer]} and as {item.memory_dtype}"
        for store in body.stores:
            if store.mode == "add" and store.memory_dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
                return f"no atomic add to {store.memory_dtype}"
        for value in body.values():
            if value.dtype not in COMPUTE or (isinstance(value, Cast) and value.to not in POINTER):
                return f"no {value.dtype} in Triton kernels"
            reason = unsupported(value) if isinstance(value, Op) else None
            if reason is not None:
                return reason
        exprs = [expr for value in body.values() for expr in value.indices()] + [store.index for store in body.stores]
        parts = (unprintable(expr) for expr in (*exprs, *(loop.size for loop in (*body.loops, *body.reduction))))
        return next((f"index {part} has no Triton form" for part in parts if part is not None), None)

    def generate(
        self,
        body: Body,
        hint: str,
        comment: str = "",
        size_hints: Mapping[str, int] | None = None,
        tiling: Tiling | None = None,
    ) -> KernelSource:
        """Source for `body`; `tiling` overrides the heuristic choice of axes and block sizes."""
        known = size_hints or {}
        hints = {symbol: known.get(str(symbol), tilings.DEFAULT_HINT) for symbol in body.size_symbols()}
        name = re.sub(r"\W+", "_", hint).strip("_") or "kernel"
        return _Kernel(body, tiling or tilings.choose(body, hints), name).source(comment, tuple(hints.values()))

    def load(self, sources: Sequence[KernelSource], cache_dir: Path) -> Mapping[str, Launcher]:
        """Launchers for the current CUDA device, or for Triton's interpreter when TRITON_INTERPRET=1."""
        return load_kernels(sources, cache_dir)


class _Scope:
    """Lines of a function at one indentation, in order."""

    def __init__(self, lines: list[str], depth: int) -> None:
        self.lines = lines
        self.depth = depth

    def __call__(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def inner(self) -> _Scope:
        return _Scope(self.lines, self.depth + 1)


class _Kernel:
    """What all stages of one kernel share: arguments, axes and index arithmetic."""

    def __init__(self, body: Body, tiling: Tiling, name: str) -> None:
        self.body = body
        self.tiling = tiling
        self.name = name
        self.ranges = body.ranges()
        self.sizes = tuple(body.size_symbols())
        self.reduced = {loop.symbol for loop in body.reduction}
        self.is_reduction = bool(body.reduction)
        self.arguments = _argument_names(body)
        self.axes = {
            axis: loops for axis, loops in (("y", tiling.y), ("x", tiling.x), ("r", tiling.r)) if loops or axis == "x"
        }
        self.axis_of = {loop.symbol: axis for axis, loops in self.axes.items() for loop in loops}
        self.numel = {axis: numel(loop.size for loop in loops) for axis, loops in self.axes.items()}
        self.index_name = {axis: str(loops[0].symbol) if len(loops) == 1 else axis for axis, loops in self.axes.items()}
        self.block = {"y": tiling.yblock, "x": tiling.xblock, "r": tiling.rblock}
        self.tile_axes = ("x", "r") if self.is_reduction else ("y", "x") if tiling.y else ("x",)
        self.index_bounds, self.index_dtype = self._index_width()
        self.levels = self._levels()

    def _levels(self) -> list[list[Accumulation]]:
        roots = [value for store in self.body.stores for value in store.operands()]
        position = torch.int64 if self.index_dtype != "tl.int32" else torch.int32
        return accumulations(roots, self.tiling.form in ("looped", "split"), position)

    def _index_width(self) -> tuple[tuple[sympy.Expr, ...], str]:
        """Largest indices that only a launch knows, and the dtype to index with."""
        largest: set[sympy.Expr] = set(self.numel.values())
        exprs = [expr for value in self.body.values() for expr in value.indices()]
        unknown = False
        for expr in (*exprs, *(store.index for store in self.body.stores)):
            found = bounds(expr, self.ranges)
            if found is not None:
                largest.add(found[1])
            else:
                # Values from memory are int64, so sums with them are too; anything else we cannot bound is not.
                unknown = unknown or not any(str(symbol).startswith("i") for symbol in expr.free_symbols)
        known = [int(expr) for expr in largest if expr.is_Integer]
        open_ended = tuple(sorted((expr for expr in largest if not expr.is_Integer), key=str))
        if unknown or max(known, default=0) >= _INT32_LIMIT:
            return (), "tl.int64"
        return open_ended, "INDEX" if open_ended else "tl.int32"

    # Text shared by all stages

    def printer(self, names: Mapping[sympy.Symbol, str]) -> IndexPrinter:
        return IndexPrinter({**{symbol: str(symbol) for symbol in self.sizes}, **names}, self.ranges)

    def size_text(self, expr: sympy.Expr) -> str:
        return self.printer({}).factor(expr)

    def is_masked(self, axis: str) -> bool:
        """Whether the last tile of an axis may reach past its end."""
        size = self.numel[axis]
        return not (size.is_Integer and size > 0 and int(size) % self.block[axis] == 0)

    def shape(self, axes: Iterable[str]) -> str:
        """Tile shape with 1 for axes that are not in `axes`."""
        wanted = set(axes)
        return "[" + ", ".join(f"{axis.upper()}BLOCK" if axis in wanted else "1" for axis in self.tile_axes) + "]"

    def subscript(self, axis: str) -> str:
        if len(self.tile_axes) == 1:
            return ""
        return "[:, None]" if axis == self.tile_axes[0] else "[None, :]"

    def widened(self, text: str) -> str:
        return text if self.index_dtype == "tl.int32" else f"{text}.to({self.index_dtype})"

    def is_inner(self, store: Store, varies: Mapping[Value, bool]) -> bool:
        return bool(self.reduced & store.index.free_symbols) or any(varies[value] for value in store.operands())

    # The whole source

    def source(self, comment: str, hints: tuple[int, ...]) -> KernelSource:
        """Every stage as a function, and how to launch them."""
        inner, outer = self._stores()
        constants = {f"{axis.upper()}BLOCK": self.block[axis] for axis in self.tile_axes}
        tiling = self.tiling
        x_programs = FloorDiv(self.numel["x"] + tiling.xblock - 1, tiling.xblock)
        scratch: list[_Scratch] = []
        stages: list[tuple[str, list[str], sympy.Expr]] = []
        if tiling.form == "split":
            constants["SPLITS"] = tiling.splits
            for level in self.levels:
                for accumulation in level:
                    scratch += [
                        _Scratch(f"{state.name}_parts", state.dtype, self.numel["x"] * tiling.splits)
                        for state in accumulation.states
                    ]
            for depth in range(len(self.levels)):
                lines = _Stage(self).partial(depth)
                stages.append((f"{self.name}_part{depth + 1}", lines, x_programs * tiling.splits))
            if inner:
                stages.append((f"{self.name}_inner", _Stage(self).finish(inner, True), x_programs * tiling.splits))
            if outer:
                stages.append((f"{self.name}_outer", _Stage(self).finish(outer, False), x_programs))
        else:
            programs = x_programs
            if "y" in self.axes:
                programs = programs * FloorDiv(self.numel["y"] + tiling.yblock - 1, tiling.yblock)
            programs = programs * numel(loop.size for loop in tiling.grid)
            stages.append((self.name, _Stage(self).whole(inner, outer), programs))

        if self.index_dtype == "INDEX":
            constants["INDEX"] = 0  # written as tl.int32 or tl.int64 below
        parameters = [*self.arguments.values(), *(item.name for item in scratch), *(str(size) for size in self.sizes)]
        parameters += [f"{key}: tl.constexpr = {value or 'tl.int32'}" for key, value in constants.items()]
        constants.pop("INDEX", None)
        text = f"# {self._describe()}\n{_HEADER}"
        for name, lines, _ in stages:
            head = f"def {name}({', '.join(parameters)}):"
            if len(head) > 110:
                head = f"def {name}(\n    " + ",\n    ".join(parameters) + ",\n):"
            text += "\n\n@triton.jit\n" + "\n".join([head, *lines]) + "\n"
        dtypes = tilings.memory_dtypes(self.body)
        launch = Launch(
            stages=tuple(Stage(name, programs, tiling.num_warps) for name, _, programs in stages),
            pointers=tuple(POINTER[dtypes[buffer]] for buffer in self.arguments),
            scratch=tuple((item.dtype, sympy.expand(item.elements)) for item in scratch),
            constants=tuple(constants.items()),
            index_bounds=self.index_bounds if self.index_dtype == "INDEX" else None,
            hints=hints,
        )
        digest = hashlib.sha256(repr((text, launch.identity())).encode()).hexdigest()[:12]
        return KernelSource(f"{self.name}_{digest}", text, tuple(self.arguments), self.sizes, comment, launch)

    def _stores(self) -> tuple[list[Store], list[Store]]:
        """Stores that run for every iteration of r, and those that run once an x."""
        varies = depends_on((value for store in self.body.stores for value in store.operands()), self.reduced)
        inner: list[Store] = []
        outer: list[Store] = []
        for store in self.body.stores:
            (inner if self.is_reduction and self.is_inner(store, varies) else outer).append(store)
        return inner, outer

    def _describe(self) -> str:
        parts = [f"{axis} {self.numel[axis]} by {self.block[axis]}" for axis in self.tile_axes]
        tail = f", {self.tiling.splits} programs a row" if self.tiling.splits > 1 else ""
        return f"{self.tiling.form}: {', '.join(parts)}, {self.tiling.num_warps} warps{tail}"


class _Scratch:
    """A buffer between the stages of a split kernel."""

    def __init__(self, name: str, dtype: torch.dtype, elements: sympy.Expr) -> None:
        self.name = name
        self.dtype = dtype
        self.elements = elements


class _Stage:
    """Writes one `@triton.jit` function: names of values already computed, and statements."""

    def __init__(self, kernel: _Kernel) -> None:
        self.kernel = kernel
        self.lines: list[str] = []
        self.top = _Scope(self.lines, 1)
        self.names: dict[Value, str] = {}  # values computed for the whole function
        self.value_axes: dict[Value, frozenset[str]] = {}
        self.symbols: dict[sympy.Symbol, str] = {}  # loops of whole-function axes
        self.masks: dict[str, str] = {}
        self.count = 0
        self.rereads = False  # whether a later pass reads what this one does

    # The three kinds of stage

    def whole(self, inner: Sequence[Store], outer: Sequence[Store]) -> list[str]:
        """Everything in one function: flat, tiled, persistent and looped kernels."""
        kernel = self.kernel
        self._program_axes(split=False)
        if not kernel.is_reduction:
            self._stores(self.top, self.names, outer, kernel.tile_axes)
        elif kernel.tiling.form == "persistent":
            self._axis("r", "0", self.top)
            for level in kernel.levels:
                self._reduce_tile(level)
            self._stores(self.top, self.names, inner, ("x", "r"))
            self._stores(self.top, self.names, outer, ("x",))
        else:
            for depth, level in enumerate(kernel.levels):
                self.rereads = bool(inner) or depth + 1 < len(kernel.levels)
                self._reduce_loop(level, "0", kernel.size_text(kernel.numel["r"]))
                self._finish_level(level)
            if inner:
                self._loop_over_r(inner, "0", kernel.size_text(kernel.numel["r"]))
            self._stores(self.top, self.names, outer, ("x",))
        return self.lines

    def partial(self, depth: int) -> list[str]:
        """One program's share of the reductions at `depth`, written to scratch."""
        kernel = self.kernel
        self._program_axes(split=True)
        for level in kernel.levels[:depth]:
            self._combine(level)
        first, last = self._share()
        level = kernel.levels[depth]
        self.rereads = depth + 1 < len(kernel.levels)
        self._reduce_loop(level, first, last)
        for accumulation in level:
            targets = [f"{state.name}_part" for state in accumulation.states]
            for line in accumulation.reduced([state.name for state in accumulation.states], targets):
                self.top(line)
            for state, target in zip(accumulation.states, targets, strict=True):
                self.top(f"tl.store({self._part(state.name, 'split')}, {target}{self._mask_argument(('x',))})")
        return self.lines

    def finish(self, stores: Sequence[Store], inner: bool) -> list[str]:
        """Stores of a split kernel, once all partial results are in scratch."""
        self._program_axes(split=inner)
        for level in self.kernel.levels:
            self._combine(level)
        if inner:
            first, last = self._share()
            self._loop_over_r(stores, first, last)
        else:
            self._stores(self.top, self.names, stores, ("x",))
        return self.lines

    # Axes

    def _program_axes(self, split: bool) -> None:
        """Which tile this program computes."""
        kernel, emit = self.kernel, self.top
        if kernel.index_dtype == "INDEX":
            for size in kernel.sizes:
                emit(f"{size} = {size}.to(INDEX)")
        program = kernel.widened("tl.program_id(0)")
        tiling = kernel.tiling
        if split:
            emit(f"program = {program}")
            emit("split = program % SPLITS")
            self._axis("x", "program // SPLITS", emit)
        elif tiling.y or tiling.grid:
            emit(f"program = {program}")
            for axis in reversed(kernel.tile_axes):
                blocks = f"(({kernel.size_text(kernel.numel[axis])} + {axis.upper()}BLOCK - 1) // {axis.upper()}BLOCK)"
                self._axis(axis, f"program % {blocks}", emit)
                emit(f"program = program // {blocks}")
            for loop in reversed(tiling.grid):
                if loop is tiling.grid[0]:
                    emit(f"{loop.symbol} = program")
                else:
                    emit(f"{loop.symbol} = program % {kernel.size_text(loop.size)}")
                    emit(f"program = program // {kernel.size_text(loop.size)}")
                self.symbols[loop.symbol] = str(loop.symbol)
        else:
            self._axis("x", program, emit)

    def _axis(self, axis: str, tile: str, emit: _Scope) -> None:
        """Index variable, mask and loop symbols of tile number `tile` along `axis`."""
        block = f"{axis.upper()}BLOCK"
        if tile == "0":
            self._axis_index(axis, self.kernel.widened(f"tl.arange(0, {block})"), emit)
        else:
            first = f"({tile})" if " " in tile else tile
            self._axis_index(axis, f"{first} * {block} + tl.arange(0, {block})", emit)

    def _axis_index(self, axis: str, text: str, emit: _Scope) -> None:
        kernel = self.kernel
        subscript = kernel.subscript(axis)
        name = kernel.index_name[axis]
        emit(f"{name} = ({text}){subscript}" if subscript else f"{name} = {text}")
        if kernel.is_masked(axis):
            emit(f"{axis}mask = {name} < {kernel.size_text(kernel.numel[axis])}")
            self.masks[axis] = f"{axis}mask"
        loops = kernel.axes[axis]
        if len(loops) == 1:
            self.symbols[loops[0].symbol] = name
            return
        used = self._symbols_needed(axis)
        step = sympy.S.One
        for position in range(len(loops) - 1, -1, -1):
            loop = loops[position]
            if loop.symbol in used:
                text = name if step == 1 else f"{name} // {kernel.size_text(step)}"
                if position > 0:
                    text = f"{text if step == 1 else f'({text})'} % {kernel.size_text(loop.size)}"
                emit(f"{loop.symbol} = {text}")
                self.symbols[loop.symbol] = str(loop.symbol)
            step = sympy.expand(step * loop.size)

    def _symbols_needed(self, axis: str) -> set[sympy.Symbol]:
        """Loops of an axis that occur in an index other than through the flattened axis."""
        body = self.kernel.body
        exprs = [expr for value in body.values() for expr in value.indices()] + [store.index for store in body.stores]
        used: set[sympy.Symbol] = set()
        for expr in exprs:
            used |= self._flattened(expr).free_symbols
        return used & {loop.symbol for loop in self.kernel.axes[axis]}

    def _flattened(self, expr: sympy.Expr) -> sympy.Expr:
        """`expr` with whole flattened axes in place of their loops: 4096*p0 + p1 -> x."""
        for axis, loops in self.kernel.axes.items():
            if len(loops) < 2 or not expr.free_symbols.issuperset(loop.symbol for loop in loops):
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
                expr = rest + scale * _axis_symbol(axis)
        return expr

    def _share(self) -> tuple[str, str]:
        """First and past-the-last r of this program: whole tiles, the same number for every program."""
        size = self.kernel.size_text(self.kernel.numel["r"])
        self.top(f"share = ({size} + SPLITS * RBLOCK - 1) // (SPLITS * RBLOCK) * RBLOCK")
        return "split * share", f"tl.minimum(split * share + share, {size})"

    # Reductions

    def _reduce_tile(self, level: Sequence[Accumulation]) -> None:
        """All of r is in this tile: reduce it at once."""
        self._compute(self.top, self.names, [accumulation.reduce.arg for accumulation in level])
        for accumulation in level:
            assert not isinstance(accumulation, Online)
            value = self._lanes(self.top, self.names, accumulation)
            if "r" in self.masks:
                value = f"tl.where({self.masks['r']}, {value}, {accumulation.states[0].neutral})"
            names = [state.name for state in accumulation.states]
            lanes = accumulation.start(value, self._position(accumulation))
            for line in accumulation.reduced(lanes, names):
                self.top(line)
            self._define(accumulation, names)

    def _reduce_loop(self, level: Sequence[Accumulation], first: str, last: str) -> None:
        """Accumulates a depth's reductions lane by lane over tiles of r."""
        roots = [accumulation.reduce.arg for accumulation in level]
        self._compute_outer(roots)
        for accumulation in level:
            for state in accumulation.states:
                shape = self.kernel.shape(("x", "r"))
                self.top(f"{state.name} = tl.full({shape}, {state.neutral}, {COMPUTE[state.dtype]})")
        with_r = self._open_loop(first, last)
        names = dict(self.names)
        self._compute(with_r, names, roots)
        for accumulation in level:
            states = [state.name for state in accumulation.states]
            value = self._lanes(with_r, names, accumulation)
            new = accumulation.update(states, value, self._position(accumulation))
            if len(states) > 1:  # each new state is computed from all old ones
                for at, text in enumerate(new):
                    with_r(f"next{at} = {text}")
                new = [f"next{at}" for at in range(len(new))]
            for old, text in zip(states, new, strict=True):
                if "r" in self.masks:
                    text = f"tl.where({self.masks['r']}, {text}, {old})"
                with_r(f"{old} = {text}")
        self._close_loop()

    def _finish_level(self, level: Sequence[Accumulation]) -> None:
        for accumulation in level:
            names = [state.name for state in accumulation.states]
            targets = [f"{name}_all" for name in names]
            for line in accumulation.reduced(names, targets):
                self.top(line)
            self._define(accumulation, targets)

    def _combine(self, level: Sequence[Accumulation]) -> None:
        """Results of an earlier stage: every program reduces the parts of its rows, in the same order."""
        for accumulation in level:
            parts, targets = [], []
            for state in accumulation.states:
                parts.append(f"{state.name}_lanes")
                targets.append(f"{state.name}_all")
                where = self._part(state.name, "tl.arange(0, SPLITS)[None, :]")
                self.top(f"{parts[-1]} = tl.load({where}{self._mask_argument(('x',))})")
            for line in accumulation.reduced(parts, targets):
                self.top(line)
            self._define(accumulation, targets)

    def _part(self, name: str, split: str) -> str:
        """Pointer to the part of `split`: parts of neighbouring rows are neighbours."""
        size = self.kernel.size_text(self.kernel.numel["x"])
        row = self.kernel.index_name["x"] if self.kernel.axes["x"] else "tl.full([XBLOCK, 1], 0, tl.int32)"
        return f"{name}_parts + ({row} + {split} * {size})"

    def _define(self, accumulation: Accumulation, reduced: Sequence[str]) -> None:
        for value, text in zip(accumulation.provides, accumulation.results(reduced), strict=True):
            if not text.isidentifier():
                name = self._fresh()
                self.top(f"{name} = {text}")
                text = name
            self.names[value] = text
            self.value_axes[value] = frozenset({"x"})

    def _lanes(self, emit: _Scope, names: Mapping[Value, str], accumulation: Accumulation) -> str:
        """The argument of a reduction as a full tile of the state's dtype."""
        arg = accumulation.reduce.arg
        text = converted_name(names[arg], arg.dtype, accumulation.states[0].dtype)
        if self.value_axes[arg] != {"x", "r"}:
            text = f"tl.broadcast_to({text}, {self.kernel.shape(('x', 'r'))})"
        if not text.isidentifier():
            name = self._fresh()
            emit(f"{name} = {text}")
            return name
        return text

    def _position(self, accumulation: Accumulation) -> str:
        if not isinstance(accumulation, Position):
            return ""
        return f"tl.broadcast_to({self.kernel.index_name['r']}, {self.kernel.shape(('x', 'r'))})"

    def _open_loop(self, first: str, last: str) -> _Scope:
        self.top(f"for r_start in range({first}, {last}, RBLOCK):")
        scope = self.top.inner()
        self._axis_index("r", f"r_start + {self.kernel.widened('tl.arange(0, RBLOCK)')}", scope)
        return scope

    def _close_loop(self) -> None:
        """Names of r end with their loop."""
        for loop in self.kernel.axes["r"]:
            self.symbols.pop(loop.symbol, None)
        self.masks.pop("r", None)

    def _loop_over_r(self, stores: Sequence[Store], first: str, last: str) -> None:
        roots = [value for store in stores for value in store.operands()]
        self._compute_outer(roots)
        self.rereads = False
        scope = self._open_loop(first, last)
        self._stores(scope, dict(self.names), stores, ("x", "r"))
        self._close_loop()

    # Values

    def _fresh(self) -> str:
        self.count += 1
        return f"v{self.count - 1}"

    def _needed(self, roots: Iterable[Value], names: Mapping[Value, str]) -> list[Value]:
        """Values under `roots` that have no name yet, operands first; results of reductions are not looked into."""
        order: list[Value] = []
        done: set[Value] = set(names)
        stack = [(root, False) for root in reversed(list(roots))]
        while stack:
            value, expanded = stack.pop()
            if expanded:
                order.append(value)
                continue
            if value in done:
                continue
            assert not isinstance(value, Reduce), f"{value.kind} is used before it is reduced"
            done.add(value)
            stack.append((value, True))
            stack.extend((operand, False) for operand in reversed(value.operands()) if operand not in done)
        return order

    def _compute_outer(self, roots: Sequence[Value]) -> None:
        """Computes what does not vary with r before the loop over r."""
        varies: dict[Value, bool] = {}
        outer = []
        for value in self._needed(roots, self.names):
            varies[value] = any(varies.get(operand, False) for operand in value.operands()) or any(
                not self.kernel.reduced.isdisjoint(expr.free_symbols) for expr in value.indices()
            )
            if not varies[value] and not isinstance(value, Constant):
                outer.append(value)
        self._compute(self.top, self.names, outer)

    def _compute(self, emit: _Scope, names: dict[Value, str], roots: Sequence[Value]) -> None:
        """Statements for everything under `roots` that has no name yet."""
        order = self._needed(roots, names)
        literal_only = self._literals(order) - set(roots)
        for value in order:
            self.value_axes[value] = self._axes_of(value)
            if value not in literal_only:
                if isinstance(value, Checked):
                    mask = self._mask_argument(self.value_axes[value]).removeprefix(", ") or "None"
                    emit(f"tl.device_assert({names[value.condition]}, {value.message!r}, mask={mask})")
                name = self._fresh()
                emit(f"{name} = {self._text(value, names)}")
                names[value] = name

    def _literals(self, order: Sequence[Value]) -> set[Value]:
        """Constants that every use can write as a bare number."""
        wanted: set[Value] = {value for value in order if isinstance(value, Constant)}
        for value in order:
            for position, operand in enumerate(value.operands()):
                if operand in wanted and not (isinstance(value, Op) and as_literal(value, position)):
                    wanted.discard(operand)
        used = {operand for value in order for operand in value.operands()}
        return wanted & used

    def _axes_of(self, value: Value) -> frozenset[str]:
        axes: set[str] = set()
        for operand in value.operands():
            axes |= self.value_axes[operand]
        for expr in value.indices():
            axes |= self._index_axes(expr)
        return frozenset(axes)

    def _address_axes(self, load: Load) -> frozenset[str]:
        """The axes that the address varies with, whatever the mask does."""
        bound = (axis for _, value in load.indirect for axis in self.value_axes[value])
        return frozenset(bound) | self._index_axes(load.index)

    def _index_axes(self, expr: sympy.Expr) -> set[str]:
        return {self.kernel.axis_of[symbol] for symbol in expr.free_symbols if symbol in self.kernel.axis_of}

    def _text(self, value: Value, names: Mapping[Value, str]) -> str:
        if isinstance(value, Load):
            return self._load(value, names)
        if isinstance(value, Constant):
            return constant_text(value)
        if isinstance(value, Index):
            return self._index_value(value)
        if isinstance(value, Cast):
            text = converted(names[value.arg], value.arg.dtype, value.to)
            return text if value.to is value.dtype else f"{text}.to({COMPUTE[value.dtype]})"
        if isinstance(value, Checked):
            return names[value.arg]
        assert isinstance(value, Op)
        args = [names[arg] if arg in names else as_literal(value, at) for at, arg in enumerate(value.args)]
        return operation(value, [arg for arg in args if arg is not None])

    def _index_value(self, value: Index) -> str:
        if value.expr.is_Integer:
            return constant_text(Constant(int(value.expr), value.dtype))
        text = self._index(value.expr, (), {})
        if value.dtype is torch.bool:
            return f"({text}) != 0"
        return f"{_term(text)}.to({COMPUTE[value.dtype]})"

    def _index(
        self, expr: sympy.Expr, indirect: Sequence[tuple[sympy.Symbol, Value]], names: Mapping[Value, str]
    ) -> str:
        bound = {symbol: converted_name(names[value], value.dtype, torch.int64) for symbol, value in indirect}
        axes = {_axis_symbol(axis): name for axis, name in self.kernel.index_name.items()}
        return self.kernel.printer({**axes, **self.symbols, **bound})(self._flattened(expr))

    def _load(self, load: Load, names: Mapping[Value, str]) -> str:
        index = self._index(load.index, load.indirect, names)
        if load.mask is not None and not self.value_axes[load.mask] <= self._address_axes(load):
            # One address for many elements: Triton wants it as wide as the mask.
            index = f"{_term(index)} + tl.where({names[load.mask]}, 0, 0)"
        pointer = f"{self.kernel.arguments[load.buffer]} + {_term(index)}"
        arguments = self._mask_argument(self._axes_of(load), None if load.mask is None else names[load.mask])
        if load.mask is not None:
            arguments += ", other=0.0" if load.memory_dtype.is_floating_point else ", other=0"
        arguments += self._eviction(load)
        text = f"tl.load({pointer}{arguments})"
        if load.memory_dtype is torch.bool:
            return f"{text} != 0"
        return converted_name(text, load.memory_dtype, load.dtype)

    def _eviction(self, load: Load) -> str:
        """What the cache should do with a load in a loop over r: keep what is read again, drop what is not."""
        axes = self._axes_of(load)
        if self.kernel.tiling.form not in ("looped", "split") or "r" not in axes or load.indirect:
            return ""
        again = self.rereads or ("x" not in axes and self.kernel.numel["x"] != 1)
        return f', eviction_policy="evict_{"last" if again else "first"}"'

    def _mask_argument(self, axes: Iterable[str], condition: str | None = None) -> str:
        """`, mask` for an access that covers `axes`: axes that may reach past their end, and a condition."""
        wanted = set(axes)
        masks = [mask for axis, mask in self.masks.items() if axis in wanted]
        if condition is not None:
            masks.append(condition)
        return f", {' & '.join(masks)}" if masks else ""

    def _stores(self, emit: _Scope, names: dict[Value, str], stores: Sequence[Store], axes: Sequence[str]) -> None:
        """Computes and writes `stores`; all computing comes first, so an output may overwrite an input in place."""
        self._compute_all(emit, names, stores)
        for store in stores:
            index = self._index(store.index, store.indirect, names)
            covered = self._index_axes(store.index)
            for _, value in store.indirect:
                covered |= self.value_axes[value]
            if covered != set(axes):
                shape = self.kernel.shape(axes)
                index = f"{index} + tl.full({shape}, 0, tl.int32)"
            pointer = f"{self.kernel.arguments[store.buffer]} + {_term(index)}"
            text = self._stored(store, names)
            mask = self._mask_argument(axes, None if store.mask is None else names[store.mask])
            if store.mode == "add":
                emit(f'tl.atomic_add({pointer}, {text}{mask}, sem="relaxed")')
            else:
                emit(f"tl.store({pointer}, {text}{mask})")

    def _compute_all(self, emit: _Scope, names: dict[Value, str], stores: Sequence[Store]) -> None:
        self._compute(emit, names, [value for store in stores for value in store.operands()])

    def _stored(self, store: Store, names: Mapping[Value, str]) -> str:
        value = store.value
        if store.memory_dtype is torch.bool:
            text = names[value] if value.dtype is torch.bool else f"({names[value]} != 0)"
            return f"{text}.to(tl.uint8)"
        return converted(names[value], value.dtype, store.memory_dtype)


def _term(text: str) -> str:
    return text if text.isidentifier() else f"({text})"


def _axis_symbol(axis: str) -> sympy.Symbol:
    return sympy.Symbol(f"{axis}_flat", integer=True, nonnegative=True)


def _argument_names(body: Body) -> dict[str, str]:
    """in0, in1, … for buffers only read, out0, … for those only written, io0, … for both; by first use."""
    read = list(dict.fromkeys(load.buffer for load in body.loads()))
    written = list(dict.fromkeys(store.buffer for store in body.stores))
    names: dict[str, str] = {}
    counts = {"in": 0, "out": 0, "io": 0}
    for buffer in (*read, *(name for name in written if name not in read)):
        kind = "io" if buffer in read and buffer in written else "in" if buffer in read else "out"
        names[buffer] = f"{kind}{counts[kind]}"
        counts[kind] += 1
    return names


register(TritonGenerator())
