"""Writes one C++ function: a nest of loops, in which each value is computed as far out as possible, then the stores."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import sympy

from overlapc.codegen.cpp.accumulators import Variable
from overlapc.codegen.cpp.expressions import C_TYPE, EXPENSIVE, MEMORY_TYPE, calls_library, index_text, weight
from overlapc.codegen.cpp.loop_plan import (
    BLOCK,
    CONFLICT_BLOCK,
    PARALLEL_WORK,
    ROWS,
    SHORT_SUM,
    TILE,
    TRANSPOSE_BLOCK,
    LoopPlan,
)
from overlapc.codegen.cpp.loops import For, blocks, in_block, longer_than, plain
from overlapc.codegen.cpp.pieces import LoopPiece, pieces
from overlapc.codegen.cpp.side_by_side import Moved, side_by_side
from overlapc.codegen.cpp.transposes import tiles_of
from overlapc.codegen.cpp.values import ValueWriter
from overlapc.ir.body import Body, Checked, Load, Op, Reduce, Scan, Store, Value

_DIVISIONS = frozenset({"floor_div", "trunc_div", "remainder", "fmod"})
LANES = 16  # elements of a vector in `whole_vectors` of prelude.h


class Function(ValueWriter):
    """Writes one kernel without reductions; the base class of `ReductionFunction`."""

    def __init__(self, body: Body, plan: LoopPlan, arguments: Mapping[str, str], sizes: Sequence[sympy.Symbol]) -> None:
        """arguments: parameter name of each buffer. sizes: symbols that are parameters after the buffers."""
        super().__init__(body, arguments)
        self.plan = plan
        self.sizes = sizes
        self.lookups = 0  # arrays for lookups in loops of their own
        self.wholes = 0  # ends of whole vectors
        reduced = {loop.symbol for loop in body.reduction}
        # The loop over the columns or rows of a tile, each of which has one element in small arrays.
        self.lanes = plan.vector if plan.columns else plan.rows
        self.symbols: dict[Value, frozenset[sympy.Symbol]] = {}  # symbols of the loops that a value depends on
        for value in self.values:
            own = frozenset(symbol for expr in value.indices() for symbol in expr.free_symbols)
            below = own.union(*(self.symbols[operand] for operand in value.operands()))
            if isinstance(value, Reduce):
                below -= reduced
            if isinstance(value, Reduce | Scan) and self.lanes is not None:
                below |= {self.lanes.symbol}  # a total for each lane, even of the same constant
            self.symbols[value] = below

    def text(self, linkage: str = 'extern "C"', name: str = "KERNEL_NAME") -> str:
        """Write the whole function and return its text."""
        parameters = [f"{self.parameter_type(buffer)} {argument}" for buffer, argument in self.arguments.items()]
        parameters += [f"int64_t {symbol}" for symbol in self.sizes] + ["int64_t threads"]
        self.line(f"{linkage} {'int32_t' if self.checks else 'void'} {name}({', '.join(parameters)}) {{")
        self.depth += 1
        if self.checks:  # volatile: any thread and lane may set it, and the assignment must not be optimized away
            for number, message in enumerate(self.checks, 1):
                self.line(f"// {number}: {message!a}")
            self.line("volatile int32_t failed = 0;")
        self.write()
        if self.checks:
            self.line("return failed;")
        self.close()
        return "\n".join(self.lines) + "\n"

    def nest(
        self,
        loops: Sequence[For],
        roots: Iterable[Value],
        known: Mapping[Value, str],
        finish: Callable[[Mapping[Value, str]], Iterable[str]],
        collapsed: int = 0,
    ) -> None:
        """Write `loops` around the lines of `finish`; values that `roots` need are computed as far out as possible.

        The innermost loop may be split into pieces. No statement is written between the first `collapsed` loops.
        """
        names = dict(known)
        roots = list(roots)
        at_level: list[list[Value]] = [[] for _ in range(len(loops) + 1)]
        position = {loop.loop.symbol: at + 1 for at, loop in enumerate(loops) if loop.loop is not None}
        level: dict[Value, int] = {}
        for value in self.needed(roots, known):
            own = max((position.get(symbol, 0) for symbol in self.symbols[value]), default=0)
            own = max([own, collapsed, *(level.get(operand, 0) for operand in value.operands())])
            level[value] = own
            at_level[own].append(value)
        for loop, values in zip(loops[:-1], at_level, strict=False):
            self.define(values, names)
            self.open(loop)
        if loops:
            self.define(at_level[-2], names)
            self.innermost(loops[-1], len(loops) > collapsed, at_level[-1], roots, names, finish)
        else:
            self.define(at_level[-1], names)
            self.write_lines(finish(names))
        for loop in reversed(loops[:-1]):
            self.close(loop)

    def innermost(
        self,
        loop: For,
        divisible: bool,
        values: Sequence[Value],
        roots: Sequence[Value],
        known: Mapping[Value, str],
        finish: Callable[[Mapping[Value, str]], Iterable[str]],
    ) -> None:
        """Write the innermost loop with the values that `roots` need in it and the lines of `finish`.

        If `divisible`, it is split into pieces where that pays. values: the values that depend on the loop.
        """
        self.write_lines(loop.before)
        assert loop.loop is not None
        parts = pieces(values, loop.loop) if divisible else [LoopPiece()]
        together = self._side_by_side(parts, loop, roots, known)
        if together is not None:
            self._write_side_by_side(together, loop, known, finish)
            parts = []
        for piece in parts:
            self.facts = piece.facts
            names = dict(known)
            part = loop.between(piece.begin, piece.end)
            wanted = self.needed(roots, names)
            rest = self._divided(part) if len(parts) == 1 and self._has_costly_rest(part, wanted) else None
            if rest is not None:
                part = replace(part, end=rest.begin)
            gathered = self._gather_ahead(part, wanted, names)
            self.begin(part)
            for load, element in gathered.items():
                self.define_load(load, element, names)
            self.define(self.needed(roots, names) if gathered else wanted, names)
            self.write_lines(finish(names))
            self.close()
            if rest is not None:
                self._write_rest(rest, wanted, known, finish)
        self.facts = {}
        self.write_lines(loop.after)

    def _gather_ahead(self, loop: For, values: Sequence[Value], known: Mapping[Value, str]) -> dict[Load, str]:
        """Write a loop of its own for lookups that keep `loop` from being vectorized; return their elements' places.

        values: all values of the loop. GCC vectorizes no lookups of elements of two bytes, and no checks of indices.
        """
        most = _most_iterations(loop)
        if not loop.pragma.startswith("#pragma omp simd") or most is None:
            return {}
        assert loop.loop is not None
        found = [value for value in values if isinstance(value, Load) and self._is_lookup(value, loop.loop.symbol)]
        rest = set(values).difference(self.needed(found, known))
        if not found or not any(isinstance(value, Op) for value in rest):
            return {}  # there is nothing to vectorize
        places = {load: f"looked_up{self.lookups + at}" for at, load in enumerate(found)}  # several loops have a scope
        self.lookups += len(found)
        for load, name in places.items():
            self.line(f"{MEMORY_TYPE[load.memory_dtype]} {name}[{most}];")
        self.begin(replace(loop, pragma=""))
        names = dict(known)
        at = loop.name if loop.begin == "0" else f"{loop.name} - {loop.begin}"
        for load in found:
            self.define((value for value in self.needed([load], names) if value is not load), names)
            self.line(f"{places[load]}[{at}] = {self.element(load, names)};")
        self.close()
        return {load: f"{name}[{at}]" for load, name in places.items()}

    def _is_lookup(self, value: Value, symbol: sympy.Symbol) -> bool:
        """Whether each iteration of the loop of `symbol` loads `value` by an index from memory in a way that GCC leaves
        scalar: with a check of the index, or elements of one or two bytes."""
        if not isinstance(value, Load):
            return False
        checked = any(isinstance(index, Checked) for _, index in value.indirect if symbol in self.symbols[index])
        return self._is_indirect(value, symbol) and (checked or value.memory_dtype.itemsize < 4)

    def _has_costly_rest(self, loop: For, values: Sequence[Value]) -> bool:
        """Whether the last iterations of a loop, fewer than a vector, take long and may run as a vector with masks.

        The loop is short, or it computes functions, and its rest is more than the half vector that GCC does at once
        (softmax of rows of 77: 615 us, with masks 300; of 49: 384 and 715). What does not exist is loaded as zero: such
        iterations may neither look up nor check an index, nor divide whole numbers. GCC moves what only a store with a
        mask needs below its condition, where it vectorizes no calls.

        values: all values of the loop.
        """
        assert loop.loop is not None
        symbol, size = loop.loop.symbol, loop.loop.size
        if not loop.pragma.startswith("#pragma omp simd") or self.tiles is not None or self.body.scans():
            return False
        if not size.is_Integer or int(size) % LANES <= LANES // 2:  # of the last block or tile, too
            return False
        for value in values:
            if isinstance(value, Checked) or (isinstance(value, Load) and self._is_indirect(value, symbol)):
                return False
            if isinstance(value, Op) and not value.dtype.is_floating_point and value.name in _DIVISIONS:
                return False
            if calls_library(value):
                return False
        return LANES < int(size) <= SHORT_SUM or any(weight(value) >= EXPENSIVE for value in values)

    def _is_indirect(self, load: Load, symbol: sympy.Symbol) -> bool:
        return any(symbol in self.symbols[index] for _, index in load.indirect)

    def _divided(self, loop: For) -> For:
        """Write where the whole vectors of `loop` end, and return the rest of the loop."""
        whole = f"whole{self.wholes}"
        self.wholes += 1
        self.line(f"const int64_t {whole} = whole_vectors({loop.begin}, {loop.end});")
        return replace(loop, begin=whole)

    def _write_rest(
        self,
        loop: For,
        values: Sequence[Value],
        known: Mapping[Value, str],
        finish: Callable[[Mapping[Value, str]], Iterable[str]],
    ) -> None:
        """Write the last iterations of a loop, fewer than a vector, as one vector whose loads and stores have masks.

        values: the values that `finish` needs, operands first.
        """
        assert loop.loop is not None
        inside = f"{loop.name} < {loop.end}"
        names = dict(known)
        by_element = re.compile(rf"\b{loop.name}\b")
        self.line(f"if ({loop.begin} < {loop.end}) {{")
        self.depth += 1
        self.begin(replace(loop, end=f"{loop.begin} + {LANES}"))
        for operand in dict.fromkeys(operand for value in values for operand in self.operands_of(value)):
            if operand in known and by_element.search(known[operand]):  # an element of an array
                names[operand] = f"v{self.number[operand]}"
                kind = C_TYPE[operand.dtype]
                self.line(f"const {kind} {names[operand]} = {inside} ? {known[operand]} : {kind}(0);")
        for value in values:
            if isinstance(value, Load) and loop.loop.symbol in self.symbols[value]:
                zero = f"{MEMORY_TYPE[value.memory_dtype]}(0)"
                self.define_load(value, f"{inside} ? {self.element(value, names)} : {zero}", names)
            else:
                self.define([value], names)
        self.line(f"if ({inside}) {{")
        self.depth += 1
        self.write_lines(finish(names))
        self.close()
        self.close()
        self.close()

    def _side_by_side(
        self, parts: Sequence[LoopPiece], loop: For, roots: Sequence[Value], known: Mapping[Value, str]
    ) -> list[Moved] | None:
        """Merge `parts` into one loop.

        None if iterations must run in order, a known name contains the loop's variable, or nothing is shared.
        """
        symbol = str(loop.name)
        if len(parts) < 2 or loop.begin != "0" or loop.loop is None or symbol != str(loop.loop.symbol):
            return None
        if not loop.pragma.startswith("#pragma omp simd") or any(symbol in name for name in known.values()):
            return None
        needed = []
        for piece in parts:
            self.facts = piece.facts
            needed.append(self.needed(roots, known))
        self.facts = {}
        return side_by_side(parts, needed, loop.loop)

    def _write_side_by_side(
        self,
        together: Sequence[Moved],
        loop: For,
        known: Mapping[Value, str],
        finish: Callable[[Mapping[Value, str]], Iterable[str]],
    ) -> None:
        """Write one loop of the first piece's length: the distinct values of all pieces, then each piece's lines."""
        names = dict(known)
        self.begin(loop.between(None, sympy.Integer(together[1].shift)))
        for piece in together:
            for value in piece.values.values():
                self.number.setdefault(value, len(self.number))
            self.define((value for value in piece.values.values() if value not in names), names)
        for piece in together:
            self.facts = piece.facts
            if piece.shift:  # the piece's lines use the loop's variable as if they were in a loop of their own
                self.line(f"const int64_t {loop.name}_{piece.shift} = {loop.name} + {piece.shift};")
                self.line("{")
                self.line(f"const int64_t {loop.name} = {loop.name}_{piece.shift};")
            self.write_lines(finish({**known, **{value: names[moved] for value, moved in piece.values.items()}}))
            if piece.shift:
                self.line("}")
        self.close()

    def store_nest(
        self, loops: Sequence[For], stores: Sequence[Store], known: Mapping[Value, str], collapsed: int = 0
    ) -> None:
        """Write `loops` around `stores`; values that the stores need are computed as far out as possible."""
        roots = [value for store in stores for value in store.operands()]
        self.nest(loops, roots, known, lambda names: [self.store(store, names) for store in stores], collapsed)

    # ---- lanes

    def tile(self) -> int:
        """Return the number of columns, or rows, that are accumulated together."""
        assert self.lanes is not None
        most = TILE if self.plan.columns else ROWS
        return min(most, int(self.lanes.size)) if self.lanes.size.is_Integer else most

    def over_lanes(self, lines: Iterable[str]) -> None:
        """Write a loop that runs `lines` for every lane."""
        self.line("for (int64_t lane = 0; lane < lanes; ++lane) {")
        self.depth += 1
        self.write_lines(lines)
        self.close()

    def declare(self, variables: Sequence[Variable]) -> None:
        """Declare each variable, or an array with one element per column, initialized to its identity."""
        for variable in variables:
            if self.plan.columns:
                self.line(f"{variable.kind} {variable.name}[{self.tile()}];")
            else:
                self.line(f"{variable.kind} {variable.name} = {variable.identity};")
        if self.plan.columns and variables:
            self.over_lanes(f"{variable.name}[lane] = {variable.identity};" for variable in variables)

    # ---- loops

    def on_threads(self, loops: Sequence[For], iterations: sympy.Expr) -> int:
        """Put an OpenMP pragma on a nest of parallel loops; return how many loops it collapses (0 if it stays serial).

        iterations: iterations of the innermost loop in total; with little work the nest stays serial.
        """
        if not loops or not self.plan.threads:
            return 0
        work = sympy.expand(iterations * self.plan.work_per_iteration)
        if work.is_Integer and work < PARALLEL_WORK:
            return 0
        pragma = "#pragma omp parallel for"
        if len(loops) > 1:
            pragma += f" collapse({len(loops)})"
        pragma += " num_threads(threads)"
        if not work.is_Integer:
            pragma += f" if({index_text(work)} >= {PARALLEL_WORK})"
        # Bounds of blocks are computed inside the innermost collapsed loop: OpenMP allows no statements between loops.
        moved = [text for loop in loops[:-1] for text in loop.inside]
        for loop in loops[:-1]:
            loop.inside = []
        loops[-1].inside = moved + loops[-1].inside
        loops[0].pragma = pragma
        return len(loops)

    def simd(self, loop: For, clauses: str = "") -> For:
        """Return `loop`, marked for vectorization if iterations of the plan's vector loop may run concurrently."""
        if self.plan.simd:
            loop.pragma = f"#pragma omp simd{clauses}"
        return loop

    def write(self) -> None:
        """Write the loops and their contents."""
        plan = self.plan
        parallel = [plain(loop) for loop in plan.outer]
        inner = [plain(loop) for loop in plan.serial]
        vector = plan.vector
        if vector is not None and plan.blocked is not None:
            self.tiles = tiles_of(self.body, plan.blocked, vector, self.memory_dtype)
            if self.tiles is not None:
                around, block = self.tiles.loops(self.arguments)
                parallel += around
                inner.append(block)
            else:
                rows, columns = TRANSPOSE_BLOCK
                parallel += [blocks(plan.blocked, rows), blocks(vector, columns)]
            inner += [in_block(plan.blocked), self.simd(in_block(vector))]
        elif vector is not None:
            step = CONFLICT_BLOCK if plan.serial and not plan.outer else BLOCK
            if plan.simd and longer_than(vector, step):
                parallel.append(blocks(vector, step))
                inner.append(self.simd(in_block(vector)))
            else:
                inner.append(self.simd(plain(vector)))
        collapsed = self.on_threads(parallel, self.body.numel())
        self.store_nest([*parallel, *inner], self.body.stores, {}, collapsed)


def _most_iterations(loop: For) -> int | None:
    """Return a bound of the iterations of an innermost loop; None if there is no small one."""
    assert loop.loop is not None
    size = loop.loop.size
    if loop.name == "lane":
        return TILE
    if loop.begin == f"{loop.loop.symbol}_block":
        return BLOCK
    return int(size) if size.is_Integer and int(size) <= BLOCK else None
