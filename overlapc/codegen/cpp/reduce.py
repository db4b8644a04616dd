"""C++ functions with reductions: rows, columns, and long reductions split into chunks.

A kernel makes one pass over the reduction loops for each depth of nested reductions, then one pass for the inner stores
that depend on all of them. Values that vary with a reduction loop are recomputed in every pass, from data that is still
in cache, unless they are expensive.

For stores that total columns (`Store.is_total`), a thread takes a chunk of rows at a time and accumulates a row of
totals for that chunk; the rows of all chunks are combined in order at the end.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import sympy
import torch

from overlapc.codegen.cpp.accumulators import Accumulator, accumulator
from overlapc.codegen.cpp.expressions import C_TYPE, EXPENSIVE, cast_text, index_text, store_text, weight
from overlapc.codegen.cpp.loop_plan import BLOCK, CHUNK_ROWS, CHUNKS, SHORT_SUM, TILE, LoopPlan, chunk_count
from overlapc.codegen.cpp.loops import For, blocks, in_block, longer_than, plain
from overlapc.codegen.cpp.reduction_stages import Stages
from overlapc.codegen.cpp.scans import ScanningFunction
from overlapc.ir.body import Body, Loop, Op, Reduce, Store, Value, compute_dtype
from overlapc.ir.indexing import numel

_IDENTITY = {"sum": "0", "prod": "1"}
_SIGN = {"sum": "+", "prod": "*"}
_ROW_BYTES = 64 * 1024  # most bytes of stored rows: they fit on each thread's stack and in the nearest caches


class ReductionFunction(ScanningFunction):
    """Writes the function of one kernel with reduction loops."""

    def __init__(self, body: Body, plan: LoopPlan, arguments: Mapping[str, str], sizes: Sequence[sympy.Symbol]) -> None:
        super().__init__(body, plan, arguments, sizes)
        self.stages = Stages(body)

    def write(self) -> None:
        """Write a pass over the reduction loops for each depth of reductions, then the stores."""
        plan = self.plan
        vector = plan.vector
        assert vector is not None
        totals = [store for store in self.body.stores if store.is_total]
        loops = [plain(loop) for loop in plan.outer] + [plain(loop) for loop in plan.serial]
        if totals:
            loops = self._chunks_of_rows(totals)
        elif self.lanes is not None:
            name = f"{self.lanes.symbol}_block"
            end = index_text(self.lanes.size)
            tile = For(name, "0", end, step=self.tile())
            tile.inside.append(f"const int64_t lanes = at_most({self.tile()}, {end} - {name});")
            loops.append(tile)
        if plan.split is None and not plan.serial:
            parallel = loops[:1] if totals else loops
            self.on_threads(parallel, numel([self.body.numel(), self.body.reduction_numel()]))
        for loop in loops:
            self.open(loop)
        known: dict[Value, str] = {}
        for stage in range(self.stages.last + 1):
            self._define_stage(stage, known)
            reduces = self.stages.reductions(stage)
            if reduces:
                self._pass(reduces, known)
        if self.stages.late_stores:
            self._inner_stores(known)
        if self.stages.outer_stores:
            self.store_nest([self._lane_loop()] if self.lanes is not None else [], self.stages.outer_stores, known)
        for loop in reversed(loops):
            self.close(loop)
        if totals:
            self._combine_chunks(totals)

    # ---- totals of columns

    def _chunks_of_rows(self, totals: Sequence[Store]) -> list[For]:
        """Allocate a row of totals per chunk; return the loops over chunks and over the rows of a chunk."""
        rows, width = index_text(self.body.numel()), index_text(self.body.reduction_numel())
        self.line(f"const int64_t rows = {rows}, width = {width};")
        self.line(f"const int64_t chunks = {index_text(chunk_count(self.body.numel(), CHUNK_ROWS))};")
        chunk = For("chunk", "0", "chunks")
        for at, store in enumerate(totals):
            kind = _total_type(store)
            self.line(f"{kind}* const parts{at} = ({kind}*)__builtin_malloc(sizeof({kind}) * chunks * width);")
            chunk.inside.append(f"{kind}* const part{at} = parts{at} + chunk * width;")
            chunk.inside.append(f"for (int64_t at = 0; at < width; ++at) part{at}[at] = {_IDENTITY[store.mode]};")
        row = For("row", "rows * chunk / chunks", "rows * (chunk + 1) / chunks")
        rest: sympy.Expr = sympy.S.One
        for loop in reversed(self.body.loops):
            outermost = loop == self.body.loops[0]
            place = "row" if rest == 1 else f"row / ({index_text(rest)})"
            row.inside.append(
                f"const int64_t {loop.symbol} = {place}{'' if outermost else f' % ({index_text(loop.size)})'};"
            )
            rest = sympy.expand(rest * loop.size)
        return [chunk, row]

    def store(self, store: Store, known: Mapping[Value, str]) -> str:
        """Return the statement of a store, as in the base class; totals are added to the chunk's row of totals."""
        if not store.is_total:
            return super().store(store, known)
        at = [other for other in self.body.stores if other.is_total].index(store)
        slot = f"part{at}[{index_text(self._flat_position())}]"
        return f"{slot} = {slot} {_SIGN[store.mode]} {known[store.value]};"

    def _combine_chunks(self, totals: Sequence[Store]) -> None:
        """Combine the totals of all chunks in order, store the results and free the chunks' rows."""
        loops = [plain(loop) for loop in self.body.reduction]
        self.on_threads(loops, self.body.reduction_numel() * CHUNKS)
        for loop in loops:
            self.open(loop)
        for at, store in enumerate(totals):
            dtype = store.value.dtype
            kind = _total_type(store)
            part = f"parts{at}[chunk * width + {index_text(self._flat_position())}]"
            self.line(f"{kind} total{at} = {_IDENTITY[store.mode]};")
            self.line(f"for (int64_t chunk = 0; chunk < chunks; ++chunk) total{at} {_SIGN[store.mode]}= {part};")
            value = f"{C_TYPE[dtype]}(total{at})"
            if store.total_dtype is not None:
                value, dtype = cast_text(value, dtype, store.total_dtype), compute_dtype(store.total_dtype)
            value = store_text(value, dtype, store.memory_dtype)
            self.line(f"{self.place(store, {})} = {value};")
        for loop in reversed(loops):
            self.close(loop)
        for at in range(len(totals)):
            self.line(f"__builtin_free(parts{at});")

    # ---- passes

    def _lane_loop(self, side_by_side: bool = True) -> For:
        """Return the loop over the columns or rows of a tile; it is vectorized if `side_by_side`."""
        assert self.lanes is not None
        symbol = self.lanes.symbol
        block = f"{symbol}_block"
        loop = For("lane", "0", "lanes", self.lanes, sympy.Symbol(block, integer=True))
        loop.inside.append(f"const int64_t {symbol} = {block} + lane;")
        return self.simd(loop) if side_by_side else loop

    @contextmanager
    def _row_loop(self) -> Iterator[None]:
        """Write the loop over the rows of a tile, if there is one, around the lines written in this context."""
        row = self._lane_loop(side_by_side=False) if self.plan.rows is not None else None
        if row is not None:
            self.open(row)
        yield
        if row is not None:
            self.close(row)

    def _define_stage(self, stage: int, known: dict[Value, str]) -> None:
        """Define the values that depend on `stage` nested reductions and are constant in the reduction loops."""
        values = [value for value in self.stages.fixed(stage) if value not in known]
        if self.lanes is None:
            self.define(values, known)
            return
        self.define((value for value in values if self.lanes.symbol not in self.symbols[value]), known)
        # A value that differs between lanes is stored in an array if a later loop needs it and it is not just a load.
        kept = [value for value in values if self.stages.crosses(value) and value not in known]
        if not kept:
            return
        for value in kept:
            self.line(f"{C_TYPE[value.dtype]} a{self.number[value]}[{self.tile()}];")
        self.nest(
            [self._lane_loop()],
            kept,
            known,
            lambda names: [f"a{self.number[value]}[lane] = {names[value]};" for value in kept],
        )
        known.update((value, f"a{self.number[value]}[lane]") for value in kept)

    def _pass(self, reduces: Sequence[Reduce], known: dict[Value, str]) -> None:
        """Write one pass over the reduction loops, which computes `reduces`."""
        columns = self.plan.columns
        vector = self.plan.vector
        assert vector is not None
        in_order = columns or vector == self.body.reduction[-1]  # the other loops keep the body's order
        row = self._short_row()
        length = self.body.reduction_numel()
        short = length.is_Integer and int(length) < 2**31
        accumulators = [accumulator(reduce, self.number[reduce], columns, in_order, short, row) for reduce in reduces]
        kept: list[Value] = []
        if self.lanes is not None:
            for part in accumulators:
                self.line(f"{C_TYPE[part.reduce.dtype]} a{part.number}[{self.tile()}];")
        if self.plan.split is None:
            kept = self._worth_storing(reduces, known)
            for value in kept:
                rows = "" if self.plan.rows is None else f"{self.tile()} * "
                self.line(f"{C_TYPE[value.dtype]} row{self.number[value]}[{rows}{vector.size}];")
        with self._row_loop():
            if self.plan.split is None:
                self._totals(accumulators)
                self._sweep(accumulators, known, None, kept)
            else:
                self._split_pass(accumulators, known, self.plan.split)
            results = [f"a{part.number}[lane] = {part.result};" for part in accumulators]
            if columns:
                self.over_lanes(results)
            for part, result in zip(accumulators, results, strict=True):
                if self.lanes is None:
                    self.line(f"const {C_TYPE[part.reduce.dtype]} v{part.number} = {part.result};")
                elif not columns:
                    self.line(result)
        for part in accumulators:
            known[part.reduce] = f"v{part.number}" if self.lanes is None else f"a{part.number}[lane]"
        known.update((value, self._stored_place(value)) for value in kept)

    def _short_row(self) -> tuple[str, int] | None:
        """Return the vector loop's variable and length if it runs over a whole short row, else None."""
        plan = self.plan
        vector = plan.vector
        if plan.columns or plan.split is not None or vector is None or not vector.size.is_Integer:
            return None
        return (str(vector.symbol), int(vector.size)) if 1 < int(vector.size) <= SHORT_SUM else None

    def _stored_place(self, value: Value) -> str:
        """Return the element, for the current iteration, of the row in which `value` is stored."""
        vector = self.plan.vector
        assert vector is not None
        row = "" if self.plan.rows is None else f"{vector.size} * lane + "
        return f"row{self.number[value]}[{row}{vector.symbol}]"

    def _worth_storing(self, reduces: Sequence[Reduce], known: Mapping[Value, str]) -> list[Value]:
        """Return values of this pass that a later pass needs and that cost more to recompute than to store in a row."""
        plan = self.plan
        if plan.columns or plan.reduction or plan.vector is None or not plan.vector.size.is_Integer:
            return []
        after = dict(known) | dict.fromkeys(reduces, "")
        roots: list[Value] = [value for value in self.values if isinstance(value, Reduce) and value not in after]
        stages = self.stages
        stage = stages.stage[reduces[0]]
        waiting = [store for store in stages.inner_stores if stages.stage_of(store) >= stage]
        roots += [value for store in waiting for value in store.operands()]
        later = set(self.needed(roots, after))
        now = _unconditional([reduce.arg for reduce in reduces], known)
        kept = [value for value in now if value in later and stages.varies[value] and weight(value) >= EXPENSIVE]
        size_bytes = sum(value.dtype.itemsize for value in kept) * int(plan.vector.size)
        size_bytes *= 1 if plan.rows is None else self.tile()
        return kept if size_bytes <= _ROW_BYTES else []

    def _totals(self, accumulators: Sequence[Accumulator]) -> None:
        """Declare the variables that reductions accumulate into, initialized to their identities."""
        self.declare([variable for part in accumulators for variable in part.totals])

    def _split_pass(self, accumulators: Sequence[Accumulator], known: dict[Value, str], split: Loop) -> None:
        """Write a pass whose chunks of the loop `split` run on threads with totals of their own, combined in order."""
        columns = self.plan.columns
        extent = f"[{self.tile()}]" if columns else ""
        lane = "[lane]" if columns else ""
        totals = [variable for part in accumulators for variable in part.totals]
        for variable in totals:
            self.line(f"{variable.kind} {variable.name}_chunk[{CHUNKS}]{extent};")
        least = CHUNK_ROWS if columns else BLOCK if split == self.plan.vector else 1
        chunks = f"chunks{accumulators[0].number}"
        self.line(f"const int64_t {chunks} = {index_text(chunk_count(split.size, least))};")
        chunk = For("chunk", "0", chunks)
        size = index_text(split.size)
        for name, at in (("begin", "chunk"), ("end", "(chunk + 1)")):
            chunk.inside.append(f"const int64_t {split.symbol}_{name} = ({size}) * {at} / {chunks};")
        width = self.tile() if columns else 1
        self.on_threads([chunk], self.body.reduction_numel() * width)
        self.open(chunk)
        self._totals(accumulators)
        self._sweep(accumulators, known, split)
        keep = [f"{variable.name}_chunk[chunk]{lane} = {variable.name}{lane};" for variable in totals]
        if columns:
            self.over_lanes(keep)
        else:
            self.write_lines(keep)
        self.close()
        self._totals(accumulators)
        self.line(f"for (int64_t chunk = 0; chunk < {chunks}; ++chunk) {{")
        self.depth += 1
        combine = [
            part.combine([f"{variable.name}_chunk[chunk]{lane}" for variable in part.totals]) for part in accumulators
        ]
        if columns:
            self.over_lanes(combine)
        else:
            self.write_lines(combine)
        self.close()

    def _range(self, loop: Loop, split: Loop | None) -> tuple[str, str]:
        """Return begin and end of a reduction loop: those of the chunk for the loop that is split."""
        return (f"{loop.symbol}_begin", f"{loop.symbol}_end") if loop == split else ("0", index_text(loop.size))

    def _sweep(
        self,
        accumulators: Sequence[Accumulator],
        known: Mapping[Value, str],
        split: Loop | None,
        kept: Sequence[Value] = (),
    ) -> None:
        plan = self.plan
        vector = plan.vector
        assert vector is not None
        stores = self.stages.early_stores(self.stages.stage[accumulators[0].reduce] - 1)
        roots = [part.reduce.arg for part in accumulators]
        roots += [value for store in stores for value in store.operands()]

        def accumulate(names: Mapping[Value, str]) -> Iterable[str]:
            positions = index_text(self._flat_position())
            lines = [text for part in accumulators for text in part.add(names[part.reduce.arg], positions)]
            lines += [self.store(store, names) for store in stores]
            return lines + [f"{self._stored_place(value)} = {names[value]};" for value in kept]

        partials = [part for part in accumulators if part.partial is not None]
        loops = [plain(loop, *self._range(loop, split)) for loop in plan.reduction]
        if plan.columns:
            self._sweep_columns(partials, loops, split)
            loops.append(self._lane_loop())
        else:
            in_order = any(part.clause is None for part in accumulators)
            clauses = None if in_order else self._clauses(accumulators)
            loops += self._along_rows(accumulators, split, clauses)
        self.nest(loops, roots, known, accumulate)

    def _clauses(self, accumulators: Sequence[Accumulator]) -> str:
        return "".join(f" reduction({part.clause})" for part in accumulators if part.clause)

    def _along_rows(self, parts: Sequence[Accumulator], split: Loop | None, clauses: str | None) -> list[For]:
        """Return the vector loop of a pass, in blocks that end with a fold; vectorized unless `clauses` is None."""
        vector = self.plan.vector
        assert vector is not None
        loops: list[For] = []
        begin, end = self._range(vector, split)
        if split == vector or longer_than(vector, BLOCK):
            block = blocks(vector, BLOCK, begin, end)
            block.inside = [text.replace(f"{vector.symbol}_end =", f"{vector.symbol}_stop =") for text in block.inside]
            loops.append(block)
            begin, end = f"{vector.symbol}_block", f"{vector.symbol}_stop"
        inner = plain(vector, begin, end)
        first = self._flat_position().subs(vector.symbol, sympy.sympify(begin, {begin: sympy.Symbol(begin)}))
        inner.before += [text for part in parts for text in part.opening(index_text(first))]
        if clauses is not None:
            self.simd(inner, clauses)
        inner.after += [part.fold for part in parts if part.fold]
        return [*loops, inner]

    def _sweep_columns(self, partials: Sequence[Accumulator], loops: list[For], split: Loop | None) -> None:
        """Block the last of `loops`: rows of a block are summed in the value's own type, the blocks' sums in double."""
        last = self.plan.reduction[-1]
        if not partials:
            return
        step = TILE
        if last == split or longer_than(last, step):
            block = blocks(last, step, *self._range(last, split))
            block.inside = [text.replace(f"{last.symbol}_end =", f"{last.symbol}_stop =") for text in block.inside]
            loops[-1:] = [block, plain(last, f"{last.symbol}_block", f"{last.symbol}_stop")]
        names = [part.partial for part in partials if part.partial]
        loops[-1].before += [f"{name}[{self.tile()}];" for name in names]
        zero = " ".join(f"{name.split()[-1]}[lane] = 0;" for name in names)
        loops[-1].before.append(f"for (int64_t lane = 0; lane < lanes; ++lane) {{ {zero} }}")
        fold = " ".join(part.fold for part in partials)
        loops[-1].after.append(f"for (int64_t lane = 0; lane < lanes; ++lane) {{ {fold} }}")

    def _flat_position(self) -> sympy.Expr:
        """Return the position in the flattened reduction space."""
        position: sympy.Expr = sympy.S.Zero
        for loop in self.body.reduction:
            position = position * loop.size + loop.symbol
        return sympy.expand(position)

    def _inner_stores(self, known: Mapping[Value, str]) -> None:
        """Write the pass after all reductions, which makes the late stores."""
        plan = self.plan
        loops = [plain(loop) for loop in plan.reduction]
        vector = plan.vector
        assert vector is not None
        parallel = list(loops)
        stores = self.stages.late_stores
        if plan.columns:
            loops.append(self._lane_loop())
        elif longer_than(vector, BLOCK) and (plan.split is not None or self.body.scans()):
            block = blocks(vector, BLOCK)
            parallel.append(block)
            loops += [block, self.simd(in_block(vector))]
        else:
            loops.append(self.simd(plain(vector)))
        width = self.tile() if plan.columns else 1
        collapsed = 0
        if plan.split is not None:
            collapsed = self.on_threads(parallel, self.body.reduction_numel() * width)
        with self._row_loop():
            roots = [value for store in stores for value in store.operands()]
            self.nest(loops, roots, known, lambda names: [self.store(store, names) for store in stores], collapsed)


def _total_type(store: Store) -> str:
    """Return the C++ type of a column's totals: for floats double, which is as exact as pairwise sums."""
    return "double" if store.value.dtype.is_floating_point else C_TYPE[store.value.dtype]


def _unconditional(roots: Iterable[Value], known: Container[Value]) -> list[Value]:
    """Return the values that `roots` need in every iteration, even if a piece of the loop knows some conditions."""
    reached: dict[Value, None] = {}
    stack = list(roots)
    while stack:
        value = stack.pop()
        if value not in reached and value not in known and value.dtype != torch.bool:
            reached[value] = None
            chooses = isinstance(value, Op) and value.name == "where"
            stack.extend(() if chooses else value.operands())
    return list(reached)
