"""The text of one C++ function: values where they belong in a nest of loops, stores at the end of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import sympy
import torch

from overlapc.codegen.cpp.expressions import (
    C_TYPE,
    FORMAT,
    MEMORY_TYPE,
    cast_text,
    constant_text,
    index_text,
    load_text,
    operation_text,
    store_text,
)
from overlapc.codegen.cpp.loops import For, blocks, in_block, longer_than, plain
from overlapc.codegen.cpp.pieces import Piece, pieces
from overlapc.codegen.cpp.plan import (
    BLOCK,
    CONFLICT_BLOCK,
    PARALLEL_WORK,
    TRANSPOSE_BLOCK,
    Plan,
)
from overlapc.codegen.cpp.side_by_side import Moved, side_by_side
from overlapc.codegen.cpp.transposes import Tiles, tiles_of
from overlapc.ir.body import (
    Body,
    Cast,
    Checked,
    Constant,
    Index,
    Load,
    Op,
    Reduce,
    Scan,
    Store,
    Value,
    depends_on,
    reduction_depth,
)


class Function:
    """Writes one kernel without reductions, and holds what `ReductionFunction` shares with it."""

    def __init__(self, body: Body, plan: Plan, arguments: Mapping[str, str], sizes: Sequence[sympy.Symbol]) -> None:
        self.body = body
        self.plan = plan
        self.arguments = arguments
        self.sizes = sizes
        self.values = body.values()
        self.checks = body.checks()
        self.number = {value: at for at, value in enumerate(self.values)}
        self.lines: list[str] = []
        self.depth = 0
        self.tiles: Tiles | None = None
        self.bits: dict[str, str] = {}  # name of a number -> name of the bits it was read from
        self.facts: Mapping[Value, bool] = {}  # conditions that hold, or do not, where we are writing
        reduced = {loop.symbol for loop in body.reduction}
        self.varies = depends_on(self.values, reduced)  # with a reduction loop
        self.stage = reduction_depth(self.values)
        # The loop whose iterations have a place each in small arrays: columns of a tile, or rows of one.
        self.lanes = plan.vector if plan.columns else plan.rows
        self.symbols: dict[Value, frozenset[sympy.Symbol]] = {}
        for value in self.values:
            own = frozenset(symbol for expr in value.indices() for symbol in expr.free_symbols)
            below = own.union(*(self.symbols[operand] for operand in value.operands()))
            if isinstance(value, Reduce):
                below -= reduced
            if isinstance(value, Reduce | Scan) and self.lanes is not None:
                below |= {self.lanes.symbol}  # a total for each lane, even of the same constant
            self.symbols[value] = below
        self.inner_stores = [store for store in body.stores if self._is_inner(store)]
        self.outer_stores = [store for store in body.stores if not self._is_inner(store)]
        self.memory_dtype: dict[str, torch.dtype] = {}
        accesses: list[Load | Store] = [*body.stores, *body.loads()]
        for access in accesses:
            self.memory_dtype.setdefault(access.buffer, access.memory_dtype)

    def _is_inner(self, store: Store) -> bool:
        if not self.body.reduction:
            return True
        reduced = {loop.symbol for loop in self.body.reduction}
        return bool(reduced & store.index.free_symbols) or any(self.varies[value] for value in store.operands())

    # ---- text

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text if text else "")

    def open(self, loop: For) -> None:
        for text in loop.before:
            self.line(text)
        self.begin(loop)

    def begin(self, loop: For) -> None:
        if loop.pragma:
            self.line(loop.pragma)
        self.line(loop.header + " {")
        self.depth += 1
        for text in loop.inside:
            self.line(text)

    def close(self, loop: For | None = None) -> None:
        self.depth -= 1
        self.line("}")
        for text in loop.after if loop is not None else ():
            self.line(text)

    def parameter_type(self, buffer: str) -> str:
        """`float*`, or `const float*` for what is only read."""
        stored = any(store.buffer == buffer for store in self.body.stores)
        return f"{'' if stored else 'const '}{MEMORY_TYPE[self.memory_dtype[buffer]]}*"

    def text(self, linkage: str = 'extern "C"', name: str = "KERNEL_NAME") -> str:
        """The whole function."""
        parameters = [f"{self.parameter_type(buffer)} {argument}" for buffer, argument in self.arguments.items()]
        parameters += [f"int64_t {symbol}" for symbol in self.sizes] + ["int64_t threads"]
        self.line(f"{linkage} {'int32_t' if self.checks else 'void'} {name}({', '.join(parameters)}) {{")
        self.depth += 1
        if self.checks:  # volatile: every thread and lane may set it, and none of that may be optimized away
            for number, message in enumerate(self.checks, 1):
                self.line(f"// {number}: {message!a}")
            self.line("volatile int32_t failed = 0;")
        self.write()
        if self.checks:
            self.line("return failed;")
        self.close()
        return "\n".join(self.lines) + "\n"

    # ---- values

    def statement(self, value: Value, known: Mapping[Value, str]) -> str:
        """The C++ expression of one value over the names of its operands."""
        if isinstance(value, Load):
            return self.element(value, known)
        if isinstance(value, Index):
            return f"{C_TYPE[value.dtype]}({index_text(value.expr)})"
        if isinstance(value, Cast):
            return cast_text(known[value.arg], value.arg.dtype, value.to)
        if isinstance(value, Checked):
            number = self.checks.index(value.message) + 1
            return f"({known[value.condition]} ? (void)0 : (void)(failed = {number}), {known[value.arg]})"
        assert isinstance(value, Op), f"{type(value).__name__} is not computed in place"
        if value.name == "where" and value.args[0] in self.facts:
            return known[self.operands_of(value)[0]]
        return operation_text(value, [known[arg] for arg in value.args])

    def element(self, load: Load, known: Mapping[Value, str]) -> str:
        """What is read: the number, or the bits of one in a format that nothing is computed in."""
        raw = load.memory_dtype in FORMAT
        zero = f"{MEMORY_TYPE[load.memory_dtype]}(0)" if raw else constant_text(0, load.dtype)
        if load.mask is not None and self.facts.get(load.mask) is False:
            return zero
        text = self.place(load, known) if raw else load_text(self.place(load, known), load.memory_dtype)
        if load.mask is None or load.mask in self.facts:
            return text
        return f"{known[load.mask]} ? {text} : {zero}"

    def place(self, access: Load | Store, known: Mapping[Value, str]) -> str:
        """`in0[4096 * p0 + r0]`."""
        if isinstance(access, Load) and self.tiles is not None and access in self.tiles.names:
            return self.tiles.place(access)
        index = access.index
        if access.indirect:
            names = {}
            for symbol, value in access.indirect:
                name = known[value] if value.dtype == torch.int64 else f"int64_t({known[value]})"
                names[symbol] = sympy.Symbol(name, integer=True)
            index = index.xreplace(names)
        argument = self.arguments[access.buffer]
        kind = MEMORY_TYPE[access.memory_dtype]
        if kind != MEMORY_TYPE[self.memory_dtype[access.buffer]]:
            argument = f"(({kind}*){argument})"  # a view of another dtype
        return f"{argument}[{index_text(index)}]"

    def store(self, store: Store, known: Mapping[Value, str]) -> str:
        assert not store.is_total, f"{store.buffer} is a total of columns, and this kernel reduces no rows"
        place = self.place(store, known)
        stored = self._as_stored(store, known)
        value, source = known[stored], stored.dtype
        unchanged = isinstance(stored, Load) and stored.memory_dtype == store.memory_dtype and store.mode == "set"
        if unchanged and value in self.bits:
            text = f"{place} = {self.bits[value]};"
            return text if store.mask is None else f"if ({known[store.mask]}) {text}"
        if store.is_atomic:
            source = torch.float32 if store.memory_dtype in (torch.bfloat16, torch.float16) else store.memory_dtype
            present, value = load_text(place, store.memory_dtype), cast_text(value, stored.dtype, source)
            if store.mode == "add":
                value = f"{present} + {value}"
            else:
                name = "maximum" if store.mode == "max" else "minimum"
                value = f"{name}<{C_TYPE[source]}>({present}, {value})"
        text = f"{place} = {store_text(value, source, store.memory_dtype)};"
        return text if store.mask is None else f"if ({known[store.mask]}) {text}"

    def _as_stored(self, store: Store, known: Mapping[Value, str]) -> Value:
        """The value to write: behind selects decided here, and before a conversion that storing does anyway."""
        stored = store.value
        while store.mode == "set":
            decided = isinstance(stored, Op) and stored.name == "where" and stored.args[0] in self.facts
            converts = isinstance(stored, Cast) and stored.to == store.memory_dtype
            if not (decided or converts):
                break
            (behind,) = self.operands_of(stored)
            if behind not in known:
                break
            stored = behind
        return stored

    def needed(self, roots: Iterable[Value], known: Mapping[Value, str]) -> list[Value]:
        """What must be computed for `roots` when `known` is there already, operands first."""
        found: set[Value] = set()
        stack = [root for root in roots if root not in known]
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                stack.extend(operand for operand in self.operands_of(value) if operand not in known)
        return sorted(found, key=self.number.__getitem__)

    def operands_of(self, value: Value) -> tuple[Value, ...]:
        """What `value` is computed from, going by `facts`."""
        if value in self.facts:
            return ()
        if isinstance(value, Op) and value.name == "where" and value.args[0] in self.facts:
            return (value.args[1 if self.facts[value.args[0]] else 2],)
        if isinstance(value, Load) and value.mask is not None and value.mask in self.facts:
            return tuple(bound for _, bound in value.indirect) if self.facts[value.mask] else ()
        return value.operands()

    def define(self, values: Iterable[Value], known: dict[Value, str]) -> None:
        """Writes `const` definitions of values, and adds their names to `known`."""
        for value in values:
            if value in self.facts:
                known[value] = "true" if self.facts[value] else "false"
                continue
            if isinstance(value, Constant):
                text = constant_text(value.number, value.dtype)
                known[value] = f"({text})" if text.startswith("-") else text
                continue
            name = f"v{self.number[value]}"
            if isinstance(value, Load) and value.memory_dtype in FORMAT:
                bits = self.bits[name] = f"b{self.number[value]}"
                self.line(f"const {MEMORY_TYPE[value.memory_dtype]} {bits} = {self.element(value, known)};")
                self.line(f"const float {name} = load_{FORMAT[value.memory_dtype]}({bits});")
            else:
                self.line(f"const {C_TYPE[value.dtype]} {name} = {self.statement(value, known)};")
            known[value] = name

    def nest(
        self,
        loops: Sequence[For],
        roots: Iterable[Value],
        known: Mapping[Value, str],
        finish: Callable[[Mapping[Value, str]], Iterable[str]],
        collapsed: int = 0,
    ) -> None:
        """Loops around the lines of `finish`, with what `roots` need computed as far out as it can be.

        The innermost loop is written in pieces. Nothing may stand between the first `collapsed` loops.
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
            for text in finish(names):
                self.line(text)
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
        """The loop around the lines of `finish` and the `values` that `roots` need there, in pieces where it pays."""
        for text in loop.before:
            self.line(text)
        assert loop.loop is not None
        parts = pieces(values, loop.loop) if divisible else [Piece()]
        together = self._side_by_side(parts, loop, roots, known)
        if together is not None:
            self._write_side_by_side(together, loop, known, finish)
            parts = []
        for piece in parts:
            self.facts = piece.facts
            names = dict(known)
            self.begin(loop.between(piece.begin, piece.end))
            self.define(self.needed(roots, names), names)
            for text in finish(names):
                self.line(text)
            self.close()
        self.facts = {}
        for text in loop.after:
            self.line(text)

    def _side_by_side(
        self, parts: Sequence[Piece], loop: For, roots: Sequence[Value], known: Mapping[Value, str]
    ) -> list[Moved] | None:
        """`parts` as one loop, where their iterations may run in any order and no name depends on the loop's."""
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
        """One loop as long as the first piece: the values of all, each once, then the lines of every piece in turn."""
        names = dict(known)
        self.begin(loop.between(None, sympy.Integer(together[1].shift)))
        for piece in together:
            for value in piece.values.values():
                self.number.setdefault(value, len(self.number))
            self.define((value for value in piece.values.values() if value not in names), names)
        for piece in together:
            self.facts = piece.facts
            if piece.shift:  # the lines name the loop's variable, as they do in a loop of their own
                self.line(f"const int64_t {loop.name}_{piece.shift} = {loop.name} + {piece.shift};")
                self.line("{")
                self.line(f"const int64_t {loop.name} = {loop.name}_{piece.shift};")
            for text in finish({**known, **{value: names[moved] for value, moved in piece.values.items()}}):
                self.line(text)
            if piece.shift:
                self.line("}")
        self.close()

    def store_nest(
        self, loops: Sequence[For], stores: Sequence[Store], known: Mapping[Value, str], collapsed: int = 0
    ) -> None:
        roots = [value for store in stores for value in store.operands()]
        self.nest(loops, roots, known, lambda names: [self.store(store, names) for store in stores], collapsed)

    # ---- loops

    def on_threads(self, loops: Sequence[For], iterations: sympy.Expr) -> int:
        """Puts the pragma on a nest of parallel loops; returns how many of them it collapses (0 when serial)."""
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
        # Bounds of blocks are computed inside the innermost collapsed loop: nothing may stand between the loops.
        moved = [text for loop in loops[:-1] for text in loop.inside]
        for loop in loops[:-1]:
            loop.inside = []
        loops[-1].inside = moved + loops[-1].inside
        loops[0].pragma = pragma
        return len(loops)

    def simd(self, loop: For, clauses: str = "") -> For:
        if self.plan.simd:
            loop.pragma = f"#pragma omp simd{clauses}"
        return loop

    def write(self) -> None:
        """The loops and what is in them."""
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
