"""Loop bodies to C++: one function a kernel, vectorized by the compiler, on OpenMP threads.

::

    // softmax over rows of 4096
    extern "C" void softmax_1f0c(float* out0, const float* in0, int64_t threads) {
      #pragma omp parallel for num_threads(threads)
      for (int64_t p0 = 0; p0 < 512; ++p0) {
        int32_t t2 = ordered(-INFINITY, INT32_MAX);
        ...

`plan.py` decides the loops; here they are written. A value is computed in the outermost loop that it depends on. A
kernel with reductions makes one pass over the reduction loops for each depth of them, then one for its inner stores;
what varies with a reduction loop is computed again in every pass, from data that is still in cache.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import sympy
import torch

from overlapc.codegen.cpp.expressions import (
    C_TYPE,
    MEMORY_TYPE,
    cast_text,
    constant_text,
    index_text,
    load_text,
    operation_text,
    store_text,
    weight,
)
from overlapc.codegen.cpp.plan import (
    BLOCK,
    CHUNKS,
    CONFLICT_BLOCK,
    PARALLEL_WORK,
    TILE,
    TRANSPOSE_BLOCK,
    Plan,
    plan,
)
from overlapc.codegen.cpp.reductions import Accumulator, accumulator
from overlapc.codegen.kernel import KernelSource, Launcher, register
from overlapc.ir.body import (
    Body,
    Cast,
    Constant,
    Index,
    Load,
    Loop,
    Op,
    Reduce,
    Store,
    Value,
    depends_on,
    reduction_depth,
)
from overlapc.ir.indexing import numel
from overlapc.runtime.cpp_launch import CppKernel, load_kernels

_HINT_CHARACTERS = 60
_DEAR = 10  # additions: exp and its like
_ROW_BYTES = 64 * 1024  # on each thread's stack, and still in the nearest caches


class CppGenerator:
    """Kernels for torch's `cpu` device."""

    device_type = "cpu"

    def refuse(self, body: Body) -> str | None:
        """Why this body cannot be generated, or None if it can."""
        dtypes = {value.dtype for value in body.values()}
        dtypes |= {load.memory_dtype for load in body.loads()} | {store.memory_dtype for store in body.stores}
        unknown = sorted(str(dtype) for dtype in dtypes - set(MEMORY_TYPE))
        if unknown:
            return f"no {', '.join(unknown)} on cpu"
        try:
            for value in body.values():
                for expr in value.indices():
                    index_text(expr)
            for store in body.stores:
                index_text(store.index)
        except NotImplementedError as error:
            return str(error)
        return None

    def generate(
        self, body: Body, hint: str, comment: str = "", size_hints: Mapping[str, int] | None = None
    ) -> KernelSource:
        """C++ for `body`; equal bodies give equal text whatever their buffers are called."""
        buffers = _argument_names(body)
        sizes = tuple(body.size_symbols())
        text = _Function(body, plan(body, size_hints), buffers, sizes).text()
        prefix = re.sub(r"\W+", "_", hint)[:_HINT_CHARACTERS].strip("_") or "kernel"
        name = f"{prefix}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
        return KernelSource(name, text.replace("KERNEL_NAME", name), tuple(buffers), sizes, comment)

    def load(self, sources: Sequence[KernelSource], cache_dir: Path) -> Mapping[str, Launcher]:
        """Compiles what is not in the cache, all at once; a launcher for each name. ToolchainError on failure."""
        kernels = [
            CppKernel(
                source.name,
                f"{prelude()}{source.text}",
                len(source.buffers),
                len(source.sizes),
                source.comment,
            )
            for source in sources
        ]
        return load_kernels(kernels, cache_dir)


@lru_cache(None)
def prelude() -> str:
    """`prelude.h`: the functions that generated code calls."""
    return (Path(__file__).parent / "prelude.h").read_text()


def _argument_names(body: Body) -> dict[str, str]:
    """Buffer -> argument: what is stored first (`out0` …), then what is only read (`in0` …), by first use."""
    stored = dict.fromkeys(store.buffer for store in body.stores)
    loaded = dict.fromkeys(load.buffer for load in body.loads() if load.buffer not in stored)
    names = {buffer: f"out{at}" for at, buffer in enumerate(stored)}
    names.update((buffer, f"in{at}") for at, buffer in enumerate(loaded))
    return names


@dataclass(slots=True)
class _For:
    """A C++ loop about to be written."""

    header: str
    symbol: sympy.Symbol | None = None  # the loop symbol it binds
    before: list[str] = field(default_factory=list)  # lines just before it, pragmas last
    inside: list[str] = field(default_factory=list)  # first lines of its body
    after: list[str] = field(default_factory=list)  # lines just after it


def _plain(loop: Loop, begin: str = "0", end: str | None = None) -> _For:
    name = loop.symbol
    end = index_text(loop.size) if end is None else end
    return _For(f"for (int64_t {name} = {begin}; {name} < {end}; ++{name})", loop.symbol)


def _blocks(loop: Loop, step: int, begin: str = "0", end: str | None = None) -> _For:
    """The loop over blocks of `loop`; `_in_block` is the one over a block."""
    name = f"{loop.symbol}_block"
    end = index_text(loop.size) if end is None else end
    return _For(
        f"for (int64_t {name} = {begin}; {name} < {end}; {name} += {step})",
        inside=[f"const int64_t {loop.symbol}_end = at_most({name} + {step}, {end});"],
    )


def _in_block(loop: Loop) -> _For:
    return _plain(loop, f"{loop.symbol}_block", f"{loop.symbol}_end")


def _longer_than(loop: Loop, step: int) -> bool:
    """Whether `loop` may have more than `step` iterations."""
    return not (loop.size.is_Integer and int(loop.size) <= step)


class _Function:
    """Writes one kernel."""

    def __init__(
        self, body: Body, plan: Plan, arguments: Mapping[str, str], sizes: Sequence[sympy.Symbol]
    ) -> None:
        self.body = body
        self.plan = plan
        self.arguments = arguments
        self.sizes = sizes
        self.values = body.values()
        self.number = {value: at for at, value in enumerate(self.values)}
        self.lines: list[str] = []
        self.depth = 0
        reduced = {loop.symbol for loop in body.reduction}
        self.varies = depends_on(self.values, reduced)  # with a reduction loop
        self.stage = reduction_depth(self.values)
        self.symbols: dict[Value, frozenset[sympy.Symbol]] = {}
        for value in self.values:
            own = frozenset(symbol for expr in value.indices() for symbol in expr.free_symbols)
            below = own.union(*(self.symbols[operand] for operand in value.operands()))
            self.symbols[value] = below - reduced if isinstance(value, Reduce) else below
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
        return bool(reduced & store.index.free_symbols) or any(
            self.varies[value] for value in store.operands()
        )

    # ---- text

    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text if text else "")

    def open(self, loop: _For) -> None:
        for text in loop.before:
            self.line(text)
        self.line(loop.header + " {")
        self.depth += 1
        for text in loop.inside:
            self.line(text)

    def close(self, loop: _For | None = None) -> None:
        self.depth -= 1
        self.line("}")
        for text in loop.after if loop is not None else ():
            self.line(text)

    def text(self) -> str:
        """The whole function, named KERNEL_NAME."""
        stored = {store.buffer for store in self.body.stores}
        parameters = [
            f"{'' if buffer in stored else 'const '}{MEMORY_TYPE[self.memory_dtype[buffer]]}* {argument}"
            for buffer, argument in self.arguments.items()
        ]
        parameters += [f"int64_t {symbol}" for symbol in self.sizes] + ["int64_t threads"]
        self.line(f'extern "C" void KERNEL_NAME({", ".join(parameters)}) {{')
        self.depth += 1
        if self.body.reduction:
            self._reduction()
        else:
            self._pointwise()
        self.close()
        return "\n".join(self.lines) + "\n"

    # ---- values

    def statement(self, value: Value, known: Mapping[Value, str]) -> str:
        """The C++ expression of one value over the names of its operands."""
        if isinstance(value, Load):
            text = load_text(self.place(value, known), value.memory_dtype)
            if value.mask is None:
                return text
            return f"{known[value.mask]} ? {text} : {constant_text(0, value.dtype)}"
        if isinstance(value, Index):
            return f"{C_TYPE[value.dtype]}({index_text(value.expr)})"
        if isinstance(value, Cast):
            return cast_text(known[value.arg], value.arg.dtype, value.to)
        assert isinstance(value, Op), f"{type(value).__name__} is not computed in place"
        return operation_text(value, [known[arg] for arg in value.args])

    def place(self, access: Load | Store, known: Mapping[Value, str]) -> str:
        """`in0[4096 * p0 + r0]`."""
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
        place = self.place(store, known)
        value = known[store.value]
        source = store.value.dtype
        if store.mode == "add":
            source = (
                torch.float32 if store.memory_dtype in (torch.bfloat16, torch.float16) else store.memory_dtype
            )
            value = f"{load_text(place, store.memory_dtype)} + {cast_text(value, store.value.dtype, source)}"
        text = f"{place} = {store_text(value, source, store.memory_dtype)};"
        return text if store.mask is None else f"if ({known[store.mask]}) {text}"

    def needed(self, roots: Iterable[Value], known: Mapping[Value, str]) -> list[Value]:
        """What must be computed for `roots` when `known` is there already, operands first."""
        found: set[Value] = set()
        stack = [root for root in roots if root not in known]
        while stack:
            value = stack.pop()
            if value not in found:
                found.add(value)
                stack.extend(operand for operand in value.operands() if operand not in known)
        return sorted(found, key=self.number.__getitem__)

    def define(self, values: Iterable[Value], known: dict[Value, str]) -> None:
        """Writes `const` definitions of values, and adds their names to `known`."""
        for value in values:
            if isinstance(value, Constant):
                text = constant_text(value.number, value.dtype)
                known[value] = f"({text})" if text.startswith("-") else text
                continue
            name = f"v{self.number[value]}"
            self.line(f"const {C_TYPE[value.dtype]} {name} = {self.statement(value, known)};")
            known[value] = name

    def nest(
        self,
        loops: Sequence[_For],
        roots: Iterable[Value],
        known: Mapping[Value, str],
        finish: Callable[[Mapping[Value, str]], Iterable[str]],
        collapsed: int = 0,
    ) -> None:
        """Loops around the lines of `finish`, with what `roots` need computed as far out as it can be.

        Nothing may stand between the first `collapsed` loops.
        """
        names = dict(known)
        at_level: list[list[Value]] = [[] for _ in range(len(loops) + 1)]
        position = {loop.symbol: at + 1 for at, loop in enumerate(loops) if loop.symbol is not None}
        level: dict[Value, int] = {}
        for value in self.needed(roots, known):
            own = max((position.get(symbol, 0) for symbol in self.symbols[value]), default=0)
            own = max([own, collapsed, *(level.get(operand, 0) for operand in value.operands())])
            level[value] = own
            at_level[own].append(value)
        for at, values in enumerate(at_level):
            self.define(values, names)
            if at < len(loops):
                self.open(loops[at])
        for text in finish(names):
            self.line(text)
        for loop in reversed(loops):
            self.close(loop)

    def store_nest(
        self, loops: Sequence[_For], stores: Sequence[Store], known: Mapping[Value, str], collapsed: int = 0
    ) -> None:
        roots = [value for store in stores for value in store.operands()]
        self.nest(
            loops, roots, known, lambda names: [self.store(store, names) for store in stores], collapsed
        )

    # ---- loops

    def on_threads(self, loops: Sequence[_For], iterations: sympy.Expr) -> int:
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
        loops[0].before.append(pragma)
        return len(loops)

    def simd(self, loop: _For, clauses: str = "") -> _For:
        if self.plan.simd:
            loop.before.append(f"#pragma omp simd{clauses}")
        return loop

    def _pointwise(self) -> None:
        plan = self.plan
        parallel = [_plain(loop) for loop in plan.outer]
        inner = [_plain(loop) for loop in plan.serial]
        vector = plan.vector
        if vector is not None and plan.blocked is not None:
            parallel += [_blocks(plan.blocked, TRANSPOSE_BLOCK[0]), _blocks(vector, TRANSPOSE_BLOCK[1])]
            inner += [_in_block(plan.blocked), self.simd(_in_block(vector))]
        elif vector is not None:
            step = CONFLICT_BLOCK if plan.serial and not plan.outer else BLOCK
            if plan.simd and _longer_than(vector, step):
                parallel.append(_blocks(vector, step))
                inner.append(self.simd(_in_block(vector)))
            else:
                inner.append(self.simd(_plain(vector)))
        collapsed = self.on_threads(parallel, self.body.numel())
        self.store_nest([*parallel, *inner], self.body.stores, {}, collapsed)

    def _reduction(self) -> None:
        plan = self.plan
        vector = plan.vector
        assert vector is not None
        loops = [_plain(loop) for loop in plan.outer] + [_plain(loop) for loop in plan.serial]
        if plan.columns:
            name = f"{vector.symbol}_block"
            end = index_text(vector.size)
            tile = _For(f"for (int64_t {name} = 0; {name} < {end}; {name} += {self._tile()})")
            tile.inside.append(f"const int64_t lanes = at_most({self._tile()}, {end} - {name});")
            loops.append(tile)
        if plan.split is None and not plan.serial:
            self.on_threads(loops, numel([self.body.numel(), self.body.reduction_numel()]))
        for loop in loops:
            self.open(loop)
        known: dict[Value, str] = {}
        last = max(self.stage.values(), default=0)
        for stage in range(last + 1):
            self._define_stage(stage, known)
            reduces = [
                value for value in self.values if isinstance(value, Reduce) and self.stage[value] == stage + 1
            ]
            if reduces:
                self._pass(reduces, known)
        if self.inner_stores:
            self._inner_stores(known)
        if self.outer_stores:
            self.store_nest([self._lane_loop()] if plan.columns else [], self.outer_stores, known)
        for loop in reversed(loops):
            self.close(loop)

    def _tile(self) -> int:
        """Columns that are accumulated together."""
        vector = self.plan.vector
        assert vector is not None
        return min(TILE, int(vector.size)) if vector.size.is_Integer else TILE

    def _lane_loop(self, clauses: str = "") -> _For:
        """The vector loop over the columns of a tile."""
        vector = self.plan.vector
        assert vector is not None
        loop = _For("for (int64_t lane = 0; lane < lanes; ++lane)", vector.symbol)
        loop.inside.append(f"const int64_t {vector.symbol} = {vector.symbol}_block + lane;")
        return self.simd(loop, clauses)

    def _define_stage(self, stage: int, known: dict[Value, str]) -> None:
        """Computes what is the same for all reduction iterations and known after `stage` reductions."""
        values = [value for value in self.values if not self.varies[value] and self.stage[value] == stage]
        values = [value for value in values if value not in known and not isinstance(value, Reduce)]
        vector = self.plan.vector
        if not self.plan.columns or vector is None:
            self.define(values, known)
            return
        self.define((value for value in values if vector.symbol not in self.symbols[value]), known)
        # A value of its own for each column lives in an array, if a later loop needs it and it is not just a load.
        kept = [value for value in values if self._crosses(value) and value not in known]
        if not kept:
            return
        for value in kept:
            self.line(f"{C_TYPE[value.dtype]} a{self.number[value]}[{self._tile()}];")
        self.nest(
            [self._lane_loop()],
            kept,
            known,
            lambda names: [f"a{self.number[value]}[lane] = {names[value]};" for value in kept],
        )
        known.update((value, f"a{self.number[value]}[lane]") for value in kept)

    def _crosses(self, value: Value) -> bool:
        if isinstance(value, (Constant, Index)) or (isinstance(value, Load) and not value.operands()):
            return False
        return value in self._used_later()

    def _used_later(self) -> set[Value]:
        """Values that another loop than the one computing them reads."""
        later: set[Value] = set()
        for user in self.values:
            for operand in user.operands():
                crosses = (
                    self.varies[user] or isinstance(user, Reduce) or self.stage[user] > self.stage[operand]
                )
                if crosses and not self.varies[operand]:
                    later.add(operand)
        for store in self.inner_stores:
            later.update(value for value in store.operands() if not self.varies[value])
        return later

    # ---- reductions

    def _pass(self, reduces: Sequence[Reduce], known: dict[Value, str]) -> None:
        """One sweep over the reduction loops that computes `reduces`."""
        columns = self.plan.columns
        vector = self.plan.vector
        assert vector is not None
        accumulators = [accumulator(reduce, self.number[reduce], columns) for reduce in reduces]
        if self.plan.split is None:
            self._totals(accumulators)
            kept = self._worth_keeping(reduces, known)
            for value in kept:
                self.line(f"{C_TYPE[value.dtype]} row{self.number[value]}[{vector.size}];")
            self._sweep(accumulators, known, None, kept)
            known.update((value, f"row{self.number[value]}[{vector.symbol}]") for value in kept)
        else:
            self._split_pass(accumulators, known, self.plan.split)
        for part in accumulators:
            name = f"{'a' if columns else 'v'}{part.number}"
            if columns:
                self.line(f"{C_TYPE[part.reduce.dtype]} {name}[{self._tile()}];")
                self._over_lanes([f"{name}[lane] = {part.result};"])
                known[part.reduce] = f"{name}[lane]"
            else:
                self.line(f"const {C_TYPE[part.reduce.dtype]} {name} = {part.result};")
                known[part.reduce] = name

    def _worth_keeping(self, reduces: Sequence[Reduce], known: Mapping[Value, str]) -> list[Value]:
        """Values of this pass that a later one needs again and that are dearer to compute than to keep in a row."""
        plan = self.plan
        if plan.columns or plan.reduction or plan.vector is None or not plan.vector.size.is_Integer:
            return []
        after = dict(known) | dict.fromkeys(reduces, "")
        roots: list[Value] = [
            value for value in self.values if isinstance(value, Reduce) and value not in after
        ]
        roots += [value for store in self.inner_stores for value in store.operands()]
        later = set(self.needed(roots, after))
        now = self.needed([reduce.arg for reduce in reduces], known)
        kept = [value for value in now if value in later and self.varies[value] and weight(value) >= _DEAR]
        size_bytes = sum(value.dtype.itemsize for value in kept) * int(plan.vector.size)
        return kept if size_bytes <= _ROW_BYTES else []

    def _over_lanes(self, lines: Iterable[str]) -> None:
        self.line("for (int64_t lane = 0; lane < lanes; ++lane) {")
        self.depth += 1
        for text in lines:
            self.line(text)
        self.close()

    def _totals(self, accumulators: Sequence[Accumulator]) -> None:
        """Declares what each reduction accumulates into, at its identity."""
        for part in accumulators:
            for variable in part.totals:
                if self.plan.columns:
                    self.line(f"{variable.kind} {variable.name}[{self._tile()}];")
                else:
                    self.line(f"{variable.kind} {variable.name} = {variable.identity};")
        if self.plan.columns:
            self._over_lanes(
                f"{variable.name}[lane] = {variable.identity};"
                for part in accumulators
                for variable in part.totals
            )

    def _split_pass(self, accumulators: Sequence[Accumulator], known: dict[Value, str], split: Loop) -> None:
        """Chunks of one reduction loop on threads, each with totals of its own, combined in order."""
        columns = self.plan.columns
        extent = f"[{self._tile()}]" if columns else ""
        lane = "[lane]" if columns else ""
        totals = [variable for part in accumulators for variable in part.totals]
        for variable in totals:
            self.line(f"{variable.kind} {variable.name}_chunk[{CHUNKS}]{extent};")
        chunk = _For(f"for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk)")
        size = index_text(split.size)
        for name, at in (("begin", "chunk"), ("end", "(chunk + 1)")):
            chunk.inside.append(f"const int64_t {split.symbol}_{name} = ({size}) * {at} / {CHUNKS};")
        width = self._tile() if columns else 1
        self.on_threads([chunk], self.body.reduction_numel() * width)
        self.open(chunk)
        self._totals(accumulators)
        self._sweep(accumulators, known, split)
        keep = [f"{variable.name}_chunk[chunk]{lane} = {variable.name}{lane};" for variable in totals]
        if columns:
            self._over_lanes(keep)
        else:
            for text in keep:
                self.line(text)
        self.close()
        self._totals(accumulators)
        self.line(f"for (int64_t chunk = 0; chunk < {CHUNKS}; ++chunk) {{")
        self.depth += 1
        combine = [
            part.combine([f"{variable.name}_chunk[chunk]{lane}" for variable in part.totals])
            for part in accumulators
        ]
        if columns:
            self._over_lanes(combine)
        else:
            for text in combine:
                self.line(text)
        self.close()

    def _range(self, loop: Loop, split: Loop | None) -> tuple[str, str]:
        """First and end of a reduction loop: of the chunk when it is the one that is split."""
        return (
            (f"{loop.symbol}_begin", f"{loop.symbol}_end") if loop == split else ("0", index_text(loop.size))
        )

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
        roots = [part.reduce.arg for part in accumulators]

        def accumulate(names: Mapping[Value, str]) -> Iterable[str]:
            positions = self._flat_position()
            lines = [text for part in accumulators for text in part.add(names[part.reduce.arg], positions)]
            return lines + [
                f"row{self.number[value]}[{vector.symbol}] = {names[value]};" for value in kept
            ]

        partials = [part for part in accumulators if part.partial is not None]
        loops = [_plain(loop, *self._range(loop, split)) for loop in plan.reduction]
        if plan.columns:
            self._sweep_columns(partials, loops, split)
            loops.append(self._lane_loop())
        else:
            begin, end = self._range(vector, split)
            if split == vector or _longer_than(vector, BLOCK):
                block = _blocks(vector, BLOCK, begin, end)
                block.inside = [
                    text.replace(f"{vector.symbol}_end =", f"{vector.symbol}_stop =") for text in block.inside
                ]
                loops.append(block)
                inner = _plain(vector, f"{vector.symbol}_block", f"{vector.symbol}_stop")
            else:
                inner = _plain(vector, begin, end)
            inner.before += [f"{part.partial} = 0;" for part in partials if part.partial]
            if all(part.clause is not None for part in accumulators):
                self.simd(inner, "".join(f" reduction({part.clause})" for part in accumulators))
            inner.after += [part.fold for part in partials]
            loops.append(inner)
        self.nest(loops, roots, known, accumulate)

    def _sweep_columns(self, partials: Sequence[Accumulator], loops: list[_For], split: Loop | None) -> None:
        """Sums the rows of a block in the value's own type, and the blocks in double."""
        last = self.plan.reduction[-1]
        if not partials:
            return
        step = TILE
        if last == split or _longer_than(last, step):
            block = _blocks(last, step, *self._range(last, split))
            block.inside = [
                text.replace(f"{last.symbol}_end =", f"{last.symbol}_stop =") for text in block.inside
            ]
            loops[-1:] = [block, _plain(last, f"{last.symbol}_block", f"{last.symbol}_stop")]
        names = [part.partial for part in partials if part.partial]
        loops[-1].before += [f"{name}[{self._tile()}];" for name in names]
        zero = " ".join(f"{name.split()[-1]}[lane] = 0;" for name in names)
        loops[-1].before.append(f"for (int64_t lane = 0; lane < lanes; ++lane) {{ {zero} }}")
        fold = " ".join(part.fold for part in partials)
        loops[-1].after.append(f"for (int64_t lane = 0; lane < lanes; ++lane) {{ {fold} }}")

    def _flat_position(self) -> str:
        """The position in the flattened reduction space, for argmax."""
        position: sympy.Expr = sympy.S.Zero
        for loop in self.body.reduction:
            position = position * loop.size + loop.symbol
        return index_text(sympy.expand(position))

    def _inner_stores(self, known: Mapping[Value, str]) -> None:
        plan = self.plan
        loops = [_plain(loop) for loop in plan.reduction]
        vector = plan.vector
        assert vector is not None
        parallel = list(loops)
        if plan.columns:
            loops.append(self._lane_loop())
        elif plan.split is not None and _longer_than(vector, BLOCK):
            block = _blocks(vector, BLOCK)
            parallel.append(block)
            loops += [block, self.simd(_in_block(vector))]
        else:
            loops.append(self.simd(_plain(vector)))
        width = self._tile() if plan.columns else 1
        collapsed = 0
        if plan.split is not None:
            collapsed = self.on_threads(parallel, self.body.reduction_numel() * width)
        self.store_nest(loops, self.inner_stores, known, collapsed)


register(CppGenerator())
