"""Data about a generated Triton kernel besides its text: how to launch it, and what its variants assume.

A kernel is compiled once per variant: which pointers are aligned to 16 bytes, which sizes are multiples of 16, and
how wide indices must be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import sympy
import torch
from torch.utils._sympy.printers import PythonPrinter

_INT32_LIMIT = 2**31 - 2**20


@dataclass(frozen=True, slots=True)
class Stage:
    """One `@triton.jit` function of a kernel; stages run in order on one stream and take the same arguments."""

    function: str
    programs: sympy.Expr  # grid size, from the kernel's size symbols
    num_warps: int
    num_stages: int = 0  # depth of pipelined loops (loads in flight); 0: Triton's default


# Triton pointer type -> element dtype. A tensor whose memory was taken over may nominally have another dtype.
ELEMENT = {
    "*fp64": torch.float64, "*fp32": torch.float32, "*fp16": torch.float16, "*bf16": torch.bfloat16,
    "*i64": torch.int64, "*i32": torch.int32, "*i16": torch.int16, "*i8": torch.int8, "*u8": torch.uint8,
    "*fp8e4nv": torch.float8_e4m3fn, "*fp8e5": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TritonLaunch:
    """How to launch a generated kernel."""

    stages: tuple[Stage, ...]
    pointers: tuple[str, ...]  # Triton types of the buffers, in order: "*bf16"
    scratch: tuple[tuple[torch.dtype, sympy.Expr], ...]  # dtype and number of elements of buffers between stages
    constants: tuple[tuple[str, int], ...]  # block sizes; also the defaults in the source
    index_bounds: tuple[sympy.Expr, ...] | None  # largest indices; beyond int32 the launch passes INDEX=tl.int64
    hints: tuple[int, ...] = ()  # likely values of the sizes, in order, for the variant to compile ahead

    def identity(self) -> str:
        """Return the launch facts that distinguish kernels of equal text, as text."""
        stages = [(stage.function, str(stage.programs), stage.num_warps, stage.num_stages) for stage in self.stages]
        return repr((stages, self.pointers, [(str(dtype), str(size)) for dtype, size in self.scratch], self.constants))

    @property
    def scratch_bytes(self) -> sympy.Expr:
        """The bytes that the launcher allocates for each launch: the buffers of `scratch`."""
        return sympy.Add(*(dtype.itemsize * elements for dtype, elements in self.scratch))


class Source(Protocol):
    """The fields of a `KernelSource` that launching needs."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...
    @property
    def comment(self) -> str: ...
    @property
    def buffers(self) -> tuple[str, ...]: ...
    @property
    def sizes(self) -> tuple[sympy.Symbol, ...]: ...
    @property
    def launch(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class Variant:
    """What a compiled kernel may assume about its arguments; bit i is about pointer or size i."""

    aligned: int  # bits of the pointers that are multiples of 16 bytes
    divisible: int  # bits of the sizes that are multiples of 16
    wide: bool  # whether indices need int64


def launch_of(source: Source) -> TritonLaunch:
    """Return the launch facts of a Triton source."""
    launch = source.launch
    assert isinstance(launch, TritonLaunch)
    return launch


def usual_variant(source: Source) -> Variant:
    """Return the variant that a launch will most likely need: aligned pointers, and the hinted sizes."""
    launch = launch_of(source)
    hints = launch.hints or (1,) * len(source.sizes)
    bounds = [host_function(bound, source.sizes) for bound in launch.index_bounds or ()]
    return variant_of(0, len(source.buffers) + len(launch.scratch), hints, bounds)


def variant_of(misaligned: int, pointers: int, sizes: Sequence[int], bounds: Sequence[Callable[..., int]]) -> Variant:
    """Return the variant for these arguments; `misaligned` has bit i set if pointer i is no multiple of 16 bytes."""
    divisible = sum(1 << at for at, size in enumerate(sizes) if not size & 15)
    wide = any(bound(*sizes) >= _INT32_LIMIT for bound in bounds)
    return Variant(((1 << pointers) - 1) & ~misaligned, divisible, wide)


def host_function(expr: sympy.Expr, sizes: Sequence[sympy.Symbol]) -> Callable[..., int]:
    """Return `expr` as a Python function of the sizes, in order."""
    if expr.is_Integer:
        number = int(expr)
        return lambda *_: number
    text = f"lambda {', '.join(str(size) for size in sizes)}: {PythonPrinter().doprint(expr)}"
    return eval(text, {"math": math})
