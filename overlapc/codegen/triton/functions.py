"""The functions of a kernel, the scratch memory between them and the constants that they are compiled with."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from overlapc.codegen.generators import KernelSource
from overlapc.codegen.triton import products
from overlapc.codegen.triton import tiling as tilings
from overlapc.codegen.triton.shape import KernelShape
from overlapc.codegen.triton.stage import StageWriter
from overlapc.ir.indexing import numel
from overlapc.runtime.triton_kernel import TritonLaunch

HEADER = """import triton
import triton.language as tl

from overlapc.runtime import triton_prelude as ops
"""


@dataclass(frozen=True, slots=True)
class Function:
    """One stage: its name, its lines and the number of programs that run it."""

    name: str
    lines: list[str]
    programs: sympy.Expr
    num_warps: int


@dataclass(frozen=True, slots=True)
class Scratch:
    """A buffer that one function writes for the next."""

    name: str
    dtype: torch.dtype
    elements: sympy.Expr


@dataclass(frozen=True, slots=True)
class Functions:
    """A kernel's functions, launched in order with the same arguments."""

    shape: KernelShape
    functions: tuple[Function, ...]
    scratch: tuple[Scratch, ...]
    constants: dict[str, int]

    def parameters(self) -> list[str]:
        """Return the parameters of every function: buffers, scratch memory, sizes, constants."""
        shape = self.shape
        names = [*shape.arguments.values(), *(item.name for item in self.scratch), *(str(size) for size in shape.sizes)]
        names += [f"{key}: tl.constexpr = {value}" for key, value in self.constants.items()]
        return [*names, "INDEX: tl.constexpr = tl.int32"] if shape.index_dtype == "INDEX" else names


def functions_of(shape: KernelShape) -> Functions:
    """Return the functions, scratch memory and constants of the kernel `shape`."""
    form, splits = shape.tiling.form, shape.tiling.splits
    constants = {f"{axis.upper()}BLOCK": shape.block[axis] for axis in shape.tile_axes}
    if form == "split":
        return Functions(shape, tuple(_split(shape)), tuple(_parts(shape)), constants | {"SPLITS": splits})
    if form == "totals":
        constants |= {"SPLITS": splits, "COLUMNS": tilings.TOTALS_COLUMNS}
        scratch = (
            Scratch(f"total{at}_parts", store.value.dtype, shape.numel["r"] * splits)
            for at, store in enumerate(shape.totals())
        )
        return Functions(shape, tuple(_totals(shape)), tuple(scratch), constants)
    return Functions(shape, (_whole(shape),), (), constants)


def function_text(name: str, parameters: Sequence[str], lines: Sequence[str]) -> str:
    """Return the text of a `@triton.jit` function."""
    head = f"def {name}({', '.join(parameters)}):"
    if len(head) > 110:
        head = f"def {name}(\n    " + ",\n    ".join(parameters) + ",\n):"
    return "\n\n@triton.jit\n" + "\n".join([head, *lines]) + "\n"


def _blocks(size: sympy.Expr, block: int) -> sympy.Expr:
    return FloorDiv(size + block - 1, block)


def _whole(shape: KernelShape) -> Function:
    programs = numel(loop.size for loop in shape.tiling.grid)
    programs *= numel(_blocks(size, shape.block[axis]) for axis, size in shape.numel.items() if axis != "r")
    dot = shape.tiling.form == "dot"
    lines = products.lines(shape) if dot else StageWriter(shape).whole(*shape.divided_stores())
    return Function(shape.name, lines, programs, shape.tiling.num_warps)


def _totals(shape: KernelShape) -> Iterator[Function]:
    """Yield the function that passes over the rows, then the one that combines the totals of columns."""
    tiling = shape.tiling
    lines = StageWriter(shape).over_rows(*shape.divided_stores())
    yield Function(f"{shape.name}_rows", lines, sympy.Integer(tiling.splits), tiling.num_warps)
    blocks = _blocks(shape.numel["r"], tilings.TOTALS_COLUMNS)
    yield Function(f"{shape.name}_totals", StageWriter(shape).combine_totals(), blocks, tilings.TOTALS_WARPS)


def _split(shape: KernelShape) -> Iterator[Function]:
    """Yield a function for every reduction depth, then one for inner and one for outer stores."""
    inner, outer = shape.divided_stores()
    rows = _blocks(shape.numel["x"], shape.tiling.xblock)
    programs, warps = rows * shape.tiling.splits, shape.tiling.num_warps
    for depth in range(len(shape.levels)):
        yield Function(f"{shape.name}_part{depth + 1}", StageWriter(shape).partial(depth), programs, warps)
    late = StageWriter(shape).late(inner)
    if late:
        yield Function(f"{shape.name}_inner", StageWriter(shape).finish(late, True), programs, warps)
    if outer:
        yield Function(f"{shape.name}_outer", StageWriter(shape).finish(outer, False), rows, warps)


def _parts(shape: KernelShape) -> Iterator[Scratch]:
    """Yield a buffer for every state of every reduction, with one part per split."""
    for level in shape.levels:
        for accumulation in level:
            for state in accumulation.states:
                yield Scratch(f"{state.name}_parts", state.dtype, shape.numel["x"] * shape.tiling.splits)


def named_source(
    name: str, text: str, buffers: tuple[str, ...], sizes: tuple[sympy.Symbol, ...], comment: str, launch: TritonLaunch
) -> KernelSource:
    """Return the source, whose name ends with a hash of its text and launch parameters."""
    digest = hashlib.sha256(repr((text, launch.identity())).encode()).hexdigest()[:12]
    return KernelSource(f"{name}_{digest}", text, buffers, sizes, comment, launch, launch.scratch_bytes)
