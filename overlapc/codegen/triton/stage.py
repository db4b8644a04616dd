"""Writes one `@triton.jit` function of a kernel: passes over tiles, reductions in them, and stores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlapc.codegen.triton.accumulate import Accumulation, Moments, Online, Reduction, Scanning
from overlapc.codegen.triton.axes import Scope
from overlapc.codegen.triton.expressions import COMPUTE, converted
from overlapc.codegen.triton.shape import term
from overlapc.codegen.triton.tiling import power_of_two
from overlapc.codegen.triton.values import ValueWriter
from overlapc.ir.body import Load, Scan, Store, Value, reduction_depth

PARTS = 128  # programs whose totals are loaded at a time for one total of columns; fewer if there are several totals
_NEUTRAL = {"sum": "0", "prod": "1"}
_SIGN = {"sum": "+", "prod": "*"}


class StageWriter(ValueWriter):
    """Writes a whole function: `whole`, `over_rows`, `combine_totals`, `partial` or `finish` returns its lines."""

    def whole(self, inner: Sequence[Store], outer: Sequence[Store]) -> list[str]:
        """Write a kernel of one function: a flat, rows, tiled, persistent or looped kernel."""
        kernel = self.kernel
        self.program_axes(split=False)
        if not kernel.is_reduction:
            self.write(self.top, self.names, outer, kernel.tile_axes)
        elif kernel.tiling.form == "persistent":
            self.axis("r", "0", self.top)
            for level in kernel.levels:
                self.reduce_tile(level)
            self.write(self.top, self.names, inner, ("x", "r"))
            self.write(self.top, self.names, outer, ("x",))
        else:
            late = self.late(inner)
            for depth, level in enumerate(kernel.levels):
                self.rereads = bool(late) or depth + 1 < len(kernel.levels)
                self.reduce_loop(level, "0", kernel.size_text(kernel.numel["r"]), self.early(inner, depth))
                self.finish_level(level)
            if late:
                self.loop_over_r(late, "0", kernel.size_text(kernel.numel["r"]))
            self.write(self.top, self.names, outer, ("x",))
        return self.lines

    def early(self, inner: Sequence[Store], depth: int) -> list[Store]:
        """Return the stores that the pass of the reductions at `depth` can make, as they need no later reduction."""
        if self.kernel.splits_scans:
            return list(inner) if depth + 1 == len(self.kernel.levels) and not self.late(inner) else []
        return [store for store in inner if self.kernel.level_of(store) == depth < len(self.kernel.levels)]

    def late(self, inner: Sequence[Store]) -> list[Store]:
        """Return the stores that depend on the last reductions; only these may overwrite memory that the passes read.

        With split scans all inner stores are late if any is: a store may overwrite what a scan reads, and a split scan
        reads once more than `ir.hazards` assumes.
        """
        late = [store for store in inner if self.kernel.level_of(store) == len(self.kernel.levels)]
        return list(inner) if late and self.kernel.splits_scans else late

    def over_rows(self, inner: Sequence[Store], outer: Sequence[Store]) -> list[str]:
        """Write the pass of one program over its share of rows; it stores the totals of their columns to scratch."""
        kernel, function = self.kernel, self.top
        totals = kernel.totals()
        self.sizes_as_indices()
        function(f"program = {kernel.widened(kernel.program)}")
        self.axis("r", "0", function)
        for at, store in enumerate(totals):
            shape = kernel.shape(("x", "r"))
            function(f"total{at} = tl.full({shape}, {_NEUTRAL[store.mode]}, {COMPUTE[store.value.dtype]})")
        of_rows = {loop.symbol for loop in kernel.axes["x"]}
        loads = [load for load in kernel.body.loads() if not load.operands()]
        same = [load for load in loads if of_rows.isdisjoint(load.index.free_symbols)]
        self.compute(function, self.names, same)  # the same for every row
        before = dict(self.names)
        rows = kernel.size_text(kernel.numel["x"])
        function(f"for x_start in {self.steps('program * XBLOCK', rows, 'SPLITS * XBLOCK')}:")
        self.top = function.inner()
        self.axis_index("x", f"x_start + {kernel.widened('tl.arange(0, XBLOCK)')}", self.top)
        self.compute(self.top, self.names, self.independent_loads())
        for level in kernel.levels:
            self.reduce_tile(level)
        self.compute_all(self.top, self.names, totals)
        for at, store in enumerate(totals):
            value = self.whole_tile(store.value, _NEUTRAL[store.mode])
            self.top(f"total{at} = total{at} {_SIGN[store.mode]} {value}")
        self.write(self.top, self.names, [store for store in inner if not store.is_total], ("x", "r"))
        self.write(self.top, self.names, outer, ("x",))
        self.top, self.names = function, before
        self.close_axis("x")
        for at, store in enumerate(totals):
            part = f"total{at}_parts + (program * {kernel.size_text(kernel.numel['r'])} + {kernel.index_name['r']})"
            total = f"ops.total_{store.mode}(total{at})"
            self.top(f"tl.store({part}, {total}{self.mask_argument(('r',))})")
        return self.lines

    def independent_loads(self) -> list[Load]:
        """Return the loads that do not depend on reductions; they are issued before threads synchronize."""
        depth = reduction_depth([value for store in self.kernel.body.stores for value in store.operands()])
        return [load for load in self.kernel.body.loads() if not depth.get(load)]

    def whole_tile(self, value: Value, neutral: str) -> str:
        """Return `value` over all of [x, r], with `neutral` out of bounds."""
        text = self.names[value]
        if self.value_axes[value] != {"x", "r"}:
            text = f"tl.broadcast_to({text}, {self.kernel.shape(('x', 'r'))})"
        mask = " & ".join(self.masks[axis] for axis in ("x", "r") if axis in self.masks)
        return f"tl.where({mask}, {text}, {neutral})" if mask else text

    def combine_totals(self) -> list[str]:
        """Write the function that adds up the programs' totals of a block of columns in order, and stores results."""
        kernel = self.kernel
        totals = kernel.totals()
        self.sizes_as_indices()
        self.axis_index("r", f"{kernel.widened(kernel.program)} * COLUMNS + tl.arange(0, COLUMNS)", self.top)
        columns = kernel.size_text(kernel.numel["r"])
        if "r" not in self.masks:  # a tile of whole rows may need no mask where a block of columns does
            self.top(f"rmask = {kernel.index_name['r']} < {columns}")
            self.masks["r"] = "rmask"
        parts = max(32, PARTS // power_of_two(len(totals)))
        for at, store in enumerate(totals):
            shape = f"[{parts}, COLUMNS]"
            self.top(f"total{at} = tl.full({shape}, {_NEUTRAL[store.mode]}, {COMPUTE[store.value.dtype]})")
        self.top(f"for first in range(0, SPLITS, {parts}):")
        loop = self.top.inner()
        loop(f"part = (first + tl.arange(0, {parts}))[:, None]")
        for at, store in enumerate(totals):
            where = f"total{at}_parts + (part * {columns} + {kernel.index_name['r']})"
            value = f"tl.load({where}, rmask & (part < SPLITS), other={_NEUTRAL[store.mode]})"
            loop(f"total{at} = total{at} {_SIGN[store.mode]} {value}")
        for at, store in enumerate(totals):
            total = f"ops.total_{store.mode}(total{at})"
            if store.total_dtype is not None:
                total = f"{converted(total, store.value.dtype, store.total_dtype)}.to(tl.float32)"
            self.names[store.value] = total
            pointer = f"{kernel.arguments[store.buffer]} + {term(self.index(store.index, (), {}))}"
            self.top(f"tl.store({pointer}, {self.stored(store, self.names)}, rmask)")
        return self.lines

    def partial(self, depth: int) -> list[str]:
        """Write one program's share of the reductions at `depth`; it stores its states to scratch."""
        kernel = self.kernel
        self.program_axes(split=True)
        for level in kernel.levels[:depth]:
            self.combine(level)
            self.combine_before(level)
        first, last = self.share()
        level = kernel.levels[depth]
        inner, _ = kernel.divided_stores()
        self.rereads = depth + 1 < len(kernel.levels) or bool(self.late(inner))
        self.reduce_loop(level, first, last, self.early(inner, depth))
        for accumulation in level:
            targets = [f"{state.name}_part" for state in accumulation.states]
            for line in accumulation.reduced([state.name for state in accumulation.states], targets):
                self.top(line)
            for state, target in zip(accumulation.states, targets, strict=True):
                self.top(f"tl.store({self.part(state.name, 'split')}, {target}{self.mask_argument(('x',))})")
        return self.lines

    def finish(self, stores: Sequence[Store], inner: bool) -> list[str]:
        """Write the stores of a split kernel, which run after all partial results are in scratch."""
        self.program_axes(split=inner)
        for level in self.kernel.levels:
            self.combine(level)
            if inner:
                self.combine_before(level)
        if inner:
            first, last = self.share()
            self.loop_over_r(stores, first, last)
        else:
            self.write(self.top, self.names, stores, ("x",))
        return self.lines

    # Reductions

    def reduce_tile(self, level: Sequence[Accumulation]) -> None:
        """Reduce a tile that contains all of r."""
        self.compute(self.top, self.names, [accumulation.arg for accumulation in level])
        for accumulation in level:
            assert not isinstance(accumulation, Online | Moments | Scanning)
            value = self.lanes(self.top, self.names, accumulation)
            if "r" in self.masks:
                value = f"tl.where({self.masks['r']}, {value}, {accumulation.states[0].neutral})"
            names = [state.name for state in accumulation.states]
            lanes = accumulation.start(value, self.position())
            for line in accumulation.reduced(lanes, names):
                self.top(line)
            self.define(accumulation, names)

    def reduce_loop(self, level: Sequence[Accumulation], first: str, last: str, stores: Sequence[Store] = ()) -> None:
        """Write the loop over tiles of r that accumulates the reductions of `level` per lane, and makes `stores`."""
        roots = [accumulation.arg for accumulation in level]
        roots += [value for store in stores for value in store.operands()]
        self.compute_outer(roots)
        for accumulation in level:
            for state in accumulation.states:
                shape = f"[XBLOCK, RBLOCK // {state.width}]" if state.width > 1 else self.kernel.shape(("x", "r"))
                self.top(f"{state.name} = tl.full({shape}, {state.neutral}, {COMPUTE[state.dtype]})")
        with_r = self.open_scanning_loop(first, last, roots)
        names = dict(self.names)
        first_of_all = self.before_stores(names, stores, ("x", "r"), roots)
        self.compute(with_r, names, first_of_all)
        if first_of_all is not roots:
            self.write(with_r, names, stores, ("x", "r"))
            self.compute(with_r, names, roots)
        for accumulation in level:
            states = [state.name for state in accumulation.states]
            value = self.lanes(with_r, names, accumulation)
            if "r" in self.masks:
                masked = self.fresh()
                with_r(f"{masked} = tl.where({self.masks['r']}, {value}, {accumulation.states[0].neutral})")
                value = masked
            # Each new state may be computed from all old ones.
            new = states if len(states) == 1 else [f"next{at}" for at in range(len(states))]
            for line in accumulation.update(states, new, value, self.position(), self.masks.get("r", "")):
                with_r(line)
            if new != states:
                with_r(f"{', '.join(states)} = {', '.join(new)}")
        if first_of_all is roots:
            self.write(with_r, names, stores, ("x", "r"))
        self.close_axis("r")

    def finish_level(self, level: Sequence[Accumulation]) -> None:
        for accumulation in level:
            assert not isinstance(accumulation, Scanning)
            names = [state.name for state in accumulation.states]
            targets = [f"{name}_all" for name in names]
            for line in accumulation.reduced(names, targets):
                self.top(line)
            self.define(accumulation, targets)

    def combine(self, level: Sequence[Accumulation]) -> None:
        """Combine the partial results of an earlier stage; every program reduces the parts of its rows, in order."""
        for accumulation in level:
            if isinstance(accumulation, Scanning):
                continue
            targets = [f"{state.name}_all" for state in accumulation.states]
            for line in accumulation.reduced(self.parts(accumulation), targets):
                self.top(line)
            self.define(accumulation, targets)

    def combine_before(self, level: Sequence[Accumulation]) -> None:
        """Compute the states of an earlier stage's scans at the beginning of this program's share."""
        for accumulation in level:
            if not isinstance(accumulation, Scanning):
                continue
            parts = self.parts(accumulation)
            for state, part in zip(accumulation.states, parts, strict=True):
                self.top(f"{part} = tl.where(tl.arange(0, SPLITS)[None, :] < split, {part}, {state.neutral})")
            for line in accumulation.reduced(parts, [f"{state.name}_before" for state in accumulation.states]):
                self.top(line)

    def parts(self, accumulation: Accumulation) -> list[str]:
        """Load the states that all programs of a row stored, next to each other; return their names."""
        names = []
        for state in accumulation.states:
            names.append(f"{state.name}_lanes")
            where = self.part(state.name, "tl.arange(0, SPLITS)[None, :]")
            self.top(f"{names[-1]} = tl.load({where}{self.mask_argument(('x',))})")
        return names

    def part(self, name: str, split: str) -> str:
        """Return the pointer to the part of program `split`; the parts of neighbouring rows are adjacent."""
        size = self.kernel.size_text(self.kernel.numel["x"])
        row = self.kernel.index_name["x"] if self.kernel.axes["x"] else "tl.full([XBLOCK, 1], 0, tl.int32)"
        return f"{name}_parts + ({row} + {split} * {size})"

    def define(self, accumulation: Reduction, reduced: Sequence[str]) -> None:
        for value, text in zip(accumulation.provides, accumulation.results(reduced), strict=True):
            if not text.isidentifier():
                name = self.fresh()
                self.top(f"{name} = {text}")
                text = name
            self.names[value] = text
            self.value_axes[value] = frozenset({"x"})

    def lanes(self, emit: Scope, names: Mapping[Value, str], accumulation: Accumulation) -> str:
        """Return the argument of a reduction as a full tile of the state's dtype."""
        return self.tile(emit, names, accumulation.arg, accumulation.states[0].dtype)

    def open_scanning_loop(self, first: str, last: str, roots: Sequence[Value]) -> Scope:
        """Open the loop over tiles of r that computes `roots`, after initializing the states of their scans."""
        kernel = self.kernel
        for value in self.needed(roots, self.names):
            for state in kernel.scans[value].states if isinstance(value, Scan) else ():
                start = f"tl.full({kernel.shape('x')}, {state.neutral}, {COMPUTE[state.dtype]})"
                self.top(f"{state.name} = {f'{state.name}_before' if kernel.splits_scans else start}")
        return self.open_loop(first, last)

    def loop_over_r(self, stores: Sequence[Store], first: str, last: str) -> None:
        roots = [value for store in stores for value in store.operands()]
        self.compute_outer(roots)
        self.rereads = False
        scope = self.open_scanning_loop(first, last, roots)
        self.write(scope, dict(self.names), stores, ("x", "r"))
        self.close_axis("r")
