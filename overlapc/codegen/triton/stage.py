"""One `@triton.jit` function of a kernel: passes over tiles, the reductions in them, and what is stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlapc.codegen.triton.accumulate import Accumulation, Moments, Online, Reduction, Scanning
from overlapc.codegen.triton.axes import Scope
from overlapc.codegen.triton.expressions import COMPUTE, converted
from overlapc.codegen.triton.shape import term
from overlapc.codegen.triton.tiling import power_of_two
from overlapc.codegen.triton.values import ValueWriter
from overlapc.ir.body import Load, Scan, Store, Value, reduction_depth

PARTS = 128  # programs whose totals of columns are loaded at a time, of one column sum; fewer of several
_NEUTRAL = {"sum": "0", "prod": "1"}
_SIGN = {"sum": "+", "prod": "*"}


class StageWriter(ValueWriter):
    """Writes a whole function, in one of five kinds, a method each that returns its lines."""

    def whole(self, inner: Sequence[Store], outer: Sequence[Store]) -> list[str]:
        """Everything in one function: flat, tiled, persistent and looped kernels."""
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
        """Stores that the pass of the reductions at `depth` can make: nothing later holds them back."""
        if self.kernel.splits_scans:
            return list(inner) if depth + 1 == len(self.kernel.levels) and not self.late(inner) else []
        return [store for store in inner if self.kernel.level_of(store) == depth < len(self.kernel.levels)]

    def late(self, inner: Sequence[Store]) -> list[Store]:
        """Stores that wait for every reduction; only these may overwrite what the passes read.

        Of scans that are split, all: a store may go where they read, and they read once more than `ir.hazards` counts.
        """
        late = [store for store in inner if self.kernel.level_of(store) == len(self.kernel.levels)]
        return list(inner) if late and self.kernel.splits_scans else late

    def over_rows(self, inner: Sequence[Store], outer: Sequence[Store]) -> list[str]:
        """One program's share of the rows, a few whole rows at a time, and its totals of their columns to scratch."""
        kernel, function = self.kernel, self.top
        totals = kernel.totals()
        self.sizes_as_indices()
        function(f"program = {kernel.widened(kernel.program)}")
        self.axis("r", "0", function)
        for at, store in enumerate(totals):
            shape = kernel.shape(("x", "r"))
            function(f"total{at} = tl.full({shape}, {_NEUTRAL[store.mode]}, {COMPUTE[store.value.dtype]})")
        same = [load for load in kernel.body.loads() if not load.operands() and self.index_axes(load.index) <= {"r"}]
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
        """Loads that do not depend on reductions: issued first, before threads wait for each other."""
        depth = reduction_depth([value for store in self.kernel.body.stores for value in store.operands()])
        return [load for load in self.kernel.body.loads() if not depth.get(load)]

    def whole_tile(self, value: Value, neutral: str) -> str:
        """`value` over all of [x, r], `neutral` behind the ends."""
        text = self.names[value]
        if self.value_axes[value] != {"x", "r"}:
            text = f"tl.broadcast_to({text}, {self.kernel.shape(('x', 'r'))})"
        mask = " & ".join(self.masks[axis] for axis in ("x", "r") if axis in self.masks)
        return f"tl.where({mask}, {text}, {neutral})" if mask else text

    def combine_totals(self) -> list[str]:
        """A block of columns: the programs' totals added up in order, and what was asked for stored."""
        kernel = self.kernel
        totals = kernel.totals()
        self.sizes_as_indices()
        self.axis_index("r", f"{kernel.widened(kernel.program)} * COLUMNS + tl.arange(0, COLUMNS)", self.top)
        columns = kernel.size_text(kernel.numel["r"])
        if "r" not in self.masks:  # tiles of rows fit the columns, blocks of them need not
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
        """One program's share of the reductions at `depth`, written to scratch."""
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
        """Stores of a split kernel, once all partial results are in scratch."""
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
        """All of r is in this tile: reduce it at once."""
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
        """Accumulates a depth's reductions lane by lane over tiles of r, and makes `stores` on the way."""
        roots = [accumulation.arg for accumulation in level]
        roots += [value for store in stores for value in store.operands()]
        self.compute_outer(roots)
        for accumulation in level:
            for state in accumulation.states:
                shape = f"[XBLOCK, RBLOCK // {state.width}]" if state.width > 1 else self.kernel.shape(("x", "r"))
                self.top(f"{state.name} = tl.full({shape}, {state.neutral}, {COMPUTE[state.dtype]})")
        with_r = self.open_scanning_loop(first, last, roots)
        names = dict(self.names)
        self.compute(with_r, names, roots)
        for accumulation in level:
            states = [state.name for state in accumulation.states]
            value = self.lanes(with_r, names, accumulation)
            if "r" in self.masks:
                masked = self.fresh()
                with_r(f"{masked} = tl.where({self.masks['r']}, {value}, {accumulation.states[0].neutral})")
                value = masked
            # Each of several new states is computed from all old ones.
            new = states if len(states) == 1 else [f"next{at}" for at in range(len(states))]
            for line in accumulation.update(states, new, value, self.position(), self.masks.get("r", "")):
                with_r(line)
            if new != states:
                with_r(f"{', '.join(states)} = {', '.join(new)}")
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
        """Results of an earlier stage: every program reduces the parts of its rows, in the same order."""
        for accumulation in level:
            if isinstance(accumulation, Scanning):
                continue
            targets = [f"{state.name}_all" for state in accumulation.states]
            for line in accumulation.reduced(self.parts(accumulation), targets):
                self.top(line)
            self.define(accumulation, targets)

    def combine_before(self, level: Sequence[Accumulation]) -> None:
        """The states of an earlier stage's scans at the beginning of this program's share."""
        for accumulation in level:
            if not isinstance(accumulation, Scanning):
                continue
            parts = self.parts(accumulation)
            for state, part in zip(accumulation.states, parts, strict=True):
                self.top(f"{part} = tl.where(tl.arange(0, SPLITS)[None, :] < split, {part}, {state.neutral})")
            for line in accumulation.reduced(parts, [f"{state.name}_before" for state in accumulation.states]):
                self.top(line)

    def parts(self, accumulation: Accumulation) -> list[str]:
        """The states that all programs of a row have left, side by side."""
        names = []
        for state in accumulation.states:
            names.append(f"{state.name}_lanes")
            where = self.part(state.name, "tl.arange(0, SPLITS)[None, :]")
            self.top(f"{names[-1]} = tl.load({where}{self.mask_argument(('x',))})")
        return names

    def part(self, name: str, split: str) -> str:
        """Pointer to the part of `split`: parts of neighbouring rows are neighbours."""
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
        """The argument of a reduction as a full tile of the state's dtype."""
        return self.tile(emit, names, accumulation.arg, accumulation.states[0].dtype)

    def open_scanning_loop(self, first: str, last: str, roots: Sequence[Value]) -> Scope:
        """The loop over tiles of r in which `roots` are computed, after what their scans carry from tile to tile."""
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
