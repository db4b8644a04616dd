"""Loop bodies as Triton kernels.

A kernel reads like the body it comes from: axes, then a pass over tiles for every reduction depth, then stores.
See tiling.py for the forms a kernel takes, stage.py for a function's passes and accumulate.py for how reductions run.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from overlapc.codegen.kernel import KernelSource, Launcher, register
from overlapc.codegen.triton import products
from overlapc.codegen.triton import tiling as tilings
from overlapc.codegen.triton.expressions import COMPUTE, POINTER, unprintable, unsupported
from overlapc.codegen.triton.shape import KernelShape
from overlapc.codegen.triton.stage import StageWriter
from overlapc.codegen.triton.tiling import Tiling, accesses_of
from overlapc.ir.body import Body, Cast, Op
from overlapc.ir.indexing import numel
from overlapc.runtime.triton_launch import Launch, Stage, load_kernels

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
        reason = products.refuse(body) if body.dots() else None
        if reason is not None:
            return reason
        for store in body.stores:
            if store.is_atomic and store.memory_dtype in (torch.bool, torch.uint8, torch.int8, torch.int16):
                return f"no atomic {store.mode} to {store.memory_dtype}"
            if store.mode in ("max", "min") and store.memory_dtype.is_floating_point:
                return f"no atomic {store.mode} to {store.memory_dtype}: it would order NaN by its sign"
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
        choose = products.choose if body.dots() else tilings.choose
        shape = KernelShape(body, tiling or choose(body, hints), name)
        return _source(shape, comment, tuple(hints.values()))

    def load(self, sources: Sequence[KernelSource], cache_dir: Path) -> Mapping[str, Launcher]:
        """Launchers for the current CUDA device, or for Triton's interpreter when TRITON_INTERPRET=1."""
        return load_kernels(sources, cache_dir)


@dataclass(frozen=True, slots=True)
class _Function:
    """One stage: its name, its lines and how many programs run it."""

    name: str
    lines: list[str]
    programs: sympy.Expr
    num_warps: int


@dataclass(frozen=True, slots=True)
class _Scratch:
    """A buffer between the stages of a split kernel."""

    name: str
    dtype: torch.dtype
    elements: sympy.Expr


def _source(shape: KernelShape, comment: str, hints: tuple[int, ...]) -> KernelSource:
    """Every stage as a function, and how to launch them."""
    tiling = shape.tiling
    constants = {f"{axis.upper()}BLOCK": shape.block[axis] for axis in shape.tile_axes}
    scratch: list[_Scratch] = []
    if tiling.form == "split":
        functions = list(_split_functions(shape))
        scratch = list(_scratch(shape))
        constants["SPLITS"] = tiling.splits
    elif tiling.form == "totals":
        functions = list(_totals_functions(shape))
        scratch = [
            _Scratch(f"total{at}_parts", store.value.dtype, shape.numel["r"] * tiling.splits)
            for at, store in enumerate(shape.totals())
        ]
        constants |= {"SPLITS": tiling.splits, "COLUMNS": tilings.TOTALS_COLUMNS}
    else:
        functions = [_whole_function(shape)]
    parameters = [*shape.arguments.values(), *(item.name for item in scratch), *(str(size) for size in shape.sizes)]
    parameters += [f"{key}: tl.constexpr = {value}" for key, value in constants.items()]
    if shape.index_dtype == "INDEX":
        parameters.append("INDEX: tl.constexpr = tl.int32")
    text = f"# {shape.describe()}\n{_HEADER}"
    for function in functions:
        head = f"def {function.name}({', '.join(parameters)}):"
        if len(head) > 110:
            head = f"def {function.name}(\n    " + ",\n    ".join(parameters) + ",\n):"
        text += "\n\n@triton.jit\n" + "\n".join([head, *function.lines]) + "\n"
    dtypes = tilings.memory_dtypes(shape.body)
    launch = Launch(
        stages=tuple(
            Stage(function.name, function.programs, function.num_warps, tiling.num_stages) for function in functions
        ),
        pointers=tuple(POINTER[dtypes[buffer]] for buffer in shape.arguments),
        scratch=tuple((item.dtype, sympy.expand(item.elements)) for item in scratch),
        constants=tuple(constants.items()),
        index_bounds=shape.index_bounds if shape.index_dtype == "INDEX" else None,
        hints=hints,
    )
    digest = hashlib.sha256(repr((text, launch.identity())).encode()).hexdigest()[:12]
    return KernelSource(f"{shape.name}_{digest}", text, tuple(shape.arguments), shape.sizes, comment, launch)


def _blocks(size: sympy.Expr, block: int) -> sympy.Expr:
    return FloorDiv(size + block - 1, block)


def _whole_function(shape: KernelShape) -> _Function:
    programs = _blocks(shape.numel["x"], shape.tiling.xblock)
    if "y" in shape.axes:
        programs = programs * _blocks(shape.numel["y"], shape.tiling.yblock)
    programs = programs * numel(loop.size for loop in shape.tiling.grid)
    dot = shape.tiling.form == "dot"
    lines = products.lines(shape) if dot else StageWriter(shape).whole(*shape.divided_stores())
    return _Function(shape.name, lines, programs, shape.tiling.num_warps)


def _totals_functions(shape: KernelShape) -> Iterator[_Function]:
    """The pass over the rows, then the totals of their columns."""
    tiling = shape.tiling
    lines = StageWriter(shape).over_rows(*shape.divided_stores())
    yield _Function(f"{shape.name}_rows", lines, sympy.Integer(tiling.splits), tiling.num_warps)
    blocks = _blocks(shape.numel["r"], tilings.TOTALS_COLUMNS)
    yield _Function(f"{shape.name}_totals", StageWriter(shape).combine_totals(), blocks, tilings.TOTALS_WARPS)


def _split_functions(shape: KernelShape) -> Iterator[_Function]:
    """A function for every reduction depth, then one for each kind of store."""
    inner, outer = shape.divided_stores()
    rows = _blocks(shape.numel["x"], shape.tiling.xblock)
    programs, warps = rows * shape.tiling.splits, shape.tiling.num_warps
    for depth in range(len(shape.levels)):
        yield _Function(f"{shape.name}_part{depth + 1}", StageWriter(shape).partial(depth), programs, warps)
    late = StageWriter(shape).late(inner)
    if late:
        yield _Function(f"{shape.name}_inner", StageWriter(shape).finish(late, True), programs, warps)
    if outer:
        yield _Function(f"{shape.name}_outer", StageWriter(shape).finish(outer, False), rows, warps)


def _scratch(shape: KernelShape) -> Iterator[_Scratch]:
    """A buffer for every state of every reduction: one part a split."""
    for level in shape.levels:
        for accumulation in level:
            for state in accumulation.states:
                yield _Scratch(f"{state.name}_parts", state.dtype, shape.numel["x"] * shape.tiling.splits)


register(TritonGenerator())
