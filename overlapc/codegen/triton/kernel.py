"""Generates Triton kernels from loop bodies.

A kernel has the structure of its body: axes, then a pass over tiles for every reduction depth, then stores.
See tiling.py for the forms of kernels, functions.py for the functions of each form, stage.py for a function's passes,
accumulate.py for reductions and combo.py for several kernels in one launch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import sympy
import torch

from overlapc.codegen.generators import Alternative, KernelSource, Launcher, register
from overlapc.codegen.triton import attention, products
from overlapc.codegen.triton import tiling as tilings
from overlapc.codegen.triton.candidates import alternatives
from overlapc.codegen.triton.combo import combo_source, combo_tiling
from overlapc.codegen.triton.expressions import COMPUTE, POINTER, unprintable, unsupported
from overlapc.codegen.triton.functions import HEADER, function_text, functions_of, named_source
from overlapc.codegen.triton.shape import KernelShape
from overlapc.codegen.triton.tiling import Tiling, accesses_of
from overlapc.ir.body import Body, Cast, Op
from overlapc.ir.ops import Attention
from overlapc.runtime.triton_kernel import Stage, TritonLaunch
from overlapc.runtime.triton_launch import compile_sources, load_kernels


class TritonGenerator:
    """Generates Triton for CUDA devices."""

    device_type = "cuda"

    def refuse(self, body: Body) -> str | None:
        """Return why no kernel can be generated for this body, or None if it can be."""
        dtypes: dict[str, torch.dtype] = {}
        for item in accesses_of(body):
            if not _has(item.memory_dtype):
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
            if value.dtype not in COMPUTE:
                return f"no {value.dtype} in Triton kernels"
            if isinstance(value, Cast) and not _has(value.to):
                return f"no {value.to} in Triton kernels"
            reason = unsupported(value) if isinstance(value, Op) else None
            if reason is not None:
                return reason
        exprs = [expr for value in body.values() for expr in value.indices()] + [store.index for store in body.stores]
        parts = (unprintable(expr) for expr in (*exprs, *(loop.size for loop in (*body.loops, *body.reduction))))
        return next((f"index {part} has no Triton form" for part in parts if part is not None), None)

    def refuse_fused(self, body: Body) -> str | None:
        """Return why no kernel can be generated for this fused body, or None.

        Only matrix products can be refused: fusion could, for example, turn a factor into a constant.
        """
        return products.refuse(body) if body.dots() else None

    def generate(
        self,
        body: Body,
        hint: str,
        comment: str = "",
        size_hints: Mapping[str, int] | None = None,
        tiling: Tiling | None = None,
    ) -> KernelSource:
        """Return the source for `body`; `tiling` overrides the heuristic choice of axes and block sizes."""
        hints = _hints(body, size_hints or {})
        # Without checks, the text does not depend on the origin, so that equal kernels are compiled once.
        origin = comment if body.checks() else ""
        shape = KernelShape(body, tiling or _chosen(body, hints), _identifier(hint), origin=origin)
        return _source(shape, comment, tuple(hints.values()))

    def combine(self, bodies: Sequence[Body], hint: str, comment: str = "") -> KernelSource:
        """Return the source of one launch for bodies with one template."""
        return combo_source(bodies, _identifier(hint), comment)

    def alternatives(
        self, bodies: Sequence[Body], hint: str, size_hints: Mapping[str, int] | None = None, around: Any = None
    ) -> list[Alternative]:
        """Return the kernel in the heuristic tiling, or in the tiling `around`, then in others."""
        if len(bodies) > 1:
            kind, sizes, chosen = combo_tiling(bodies)
            make = partial(combo_source, bodies, _identifier(hint))
        else:
            (kind,) = bodies
            sizes = _hints(kind, size_hints or {})
            chosen = _chosen(kind, sizes)
            make = partial(self.generate, kind, hint, size_hints=size_hints)
        return [
            Alternative(make(tiling=candidate), candidate) for candidate in alternatives(kind, sizes, around or chosen)
        ]

    def refuse_attention(self, op: Attention) -> str | None:
        """Return why no kernel can be generated for this attention, or None."""
        refused = (self.refuse(body) for body in op.functions)
        return next((reason for reason in refused if reason is not None), None) or attention.refuse(op)

    def attention(self, op: Attention, comment: str = "") -> KernelSource:
        """Return the source of an attention kernel."""
        return attention.source(op, "flex_attention_backward" if op.is_backward else "flex_attention", comment)

    def compile_ahead(self, sources: Sequence[KernelSource], cache_dir: Path) -> None:
        """Start to compile sources in worker processes."""
        compile_sources(sources, cache_dir)

    def load(self, sources: Sequence[KernelSource], cache_dir: Path) -> Mapping[str, Launcher]:
        """Return launchers for the current CUDA device, or for Triton's interpreter if TRITON_INTERPRET=1."""
        return load_kernels(sources, cache_dir)


def _hints(body: Body, known: Mapping[str, int]) -> dict[sympy.Symbol, int]:
    return {symbol: known.get(str(symbol), tilings.DEFAULT_HINT) for symbol in body.size_symbols()}


def _chosen(body: Body, hints: Mapping[sympy.Symbol, int]) -> Tiling:
    return (products.choose if body.dots() else tilings.choose)(body, hints)


def _identifier(hint: str) -> str:
    return re.sub(r"\W+", "_", hint).strip("_") or "kernel"


def _source(shape: KernelShape, comment: str, hints: tuple[int, ...]) -> KernelSource:
    """Return the source with a function for every stage, and the launch parameters."""
    made = functions_of(shape)
    text = f"# {shape.describe()}\n{HEADER}"
    text += "".join(function_text(function.name, made.parameters(), function.lines) for function in made.functions)
    dtypes = tilings.memory_dtypes(shape.body)
    launch = TritonLaunch(
        stages=tuple(
            Stage(function.name, function.programs, function.num_warps, shape.tiling.num_stages)
            for function in made.functions
        ),
        pointers=tuple(POINTER[dtypes[buffer]] for buffer in shape.arguments),
        scratch=tuple((item.dtype, sympy.expand(item.elements)) for item in made.scratch),
        constants=tuple(made.constants.items()),
        index_bounds=shape.index_bounds if shape.index_dtype == "INDEX" else None,
        hints=hints,
    )
    return named_source(shape.name, text, tuple(shape.arguments), shape.sizes, comment, launch)


def _has(dtype: torch.dtype) -> bool:
    """Whether the GPU supports loads and stores of `dtype`; without a GPU, whether recent GPUs do."""
    if dtype is torch.float8_e4m3fn and torch.cuda.is_available():
        return torch.cuda.get_device_capability() >= (8, 9)  # its conversions came with Ada
    return dtype in POINTER


register(TritonGenerator())
