"""Generates C++ from loop bodies: one function per kernel, vectorized by the compiler, on OpenMP threads.

::

    // softmax over rows of 4096
    extern "C" void softmax_1f0c(float* out0, const float* in0, int64_t threads) {
      #pragma omp parallel for num_threads(threads)
      for (int64_t p0 = 0; p0 < 512; ++p0) {
        int32_t total2 = ordered(-INFINITY, INT32_MAX);
        ...

`loop_plan.py` chooses the loop structure; `function.py` and `reduce.py` write the loops; `expressions.py` and
`prelude.h` implement the operations.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sympy

from overlapc.codegen.cpp.combo import combo_text
from overlapc.codegen.cpp.expressions import MEMORY_TYPE, definitions_of, index_text
from overlapc.codegen.cpp.function import Function
from overlapc.codegen.cpp.loop_plan import plan
from overlapc.codegen.cpp.reduce import ReductionFunction
from overlapc.codegen.cpp_load import load_kernels
from overlapc.codegen.generators import Alternative, KernelSource, Launcher, register
from overlapc.ir.body import Body, Cast
from overlapc.ir.rewriting import with_sums
from overlapc.ir.template import template_of

_HINT_CHARACTERS = 60


class CppGenerator:
    """Generates kernels for torch's `cpu` device."""

    device_type = "cpu"

    def refuse(self, body: Body) -> str | None:
        """Return why no kernel can be generated for this body, or None if it can be."""
        dtypes = {value.dtype for value in body.values()}
        dtypes |= {value.to for value in body.values() if isinstance(value, Cast)}
        dtypes |= {load.memory_dtype for load in body.loads()} | {store.memory_dtype for store in body.stores}
        unknown = sorted(str(dtype) for dtype in dtypes - set(MEMORY_TYPE))
        if unknown:
            return f"no {', '.join(unknown)} on cpu"
        try:
            for value in body.values():
                for expr in value.indices():
                    index_text(expr)
            for expr in (store.index for store in body.stores):
                index_text(expr)
            for loop in (*body.loops, *body.reduction):
                index_text(loop.size)
        except NotImplementedError as error:
            return str(error)
        return None

    def refuse_fused(self, body: Body) -> str | None:
        """Return None: every fusion of kernels that can be generated is allowed."""
        return None

    def generate(
        self, body: Body, hint: str, comment: str = "", size_hints: Mapping[str, int] | None = None
    ) -> KernelSource:
        """Return C++ for `body`; bodies that differ only in buffer names have equal text."""
        body = with_sums(body)
        buffers = _argument_names(body)
        sizes = tuple(body.size_symbols())
        kind = ReductionFunction if body.reduction else Function
        text = kind(body, plan(body, size_hints), buffers, sizes).text()
        return _named(text, hint, tuple(buffers), sizes, comment, tuple(body.checks()))

    def combine(self, bodies: Sequence[Body], hint: str, comment: str = "") -> KernelSource:
        """Return C++ that runs bodies with one template: large ones one after another, small ones concurrently."""
        text, buffers = combo_text(bodies, _argument_names(template_of(bodies[0]).body))
        return _named(text, hint, buffers, (), comment, ())

    def alternatives(
        self, bodies: Sequence[Body], hint: str, size_hints: Mapping[str, int] | None = None, around: Any = None
    ) -> list[Alternative]:
        """Return the only source: there are no tilings to choose from, as the compiler and OpenMP divide the work."""
        (body, *more) = bodies
        return [Alternative(self.combine(bodies, hint) if more else self.generate(body, hint, size_hints=size_hints))]

    def load(self, sources: Sequence[KernelSource], cache_dir: Path) -> Mapping[str, Launcher]:
        """Compile sources that are not cached, at once; return a launcher per name. ToolchainError on failure."""
        return load_kernels(sources, cache_dir)


def _named(
    text: str,
    hint: str,
    buffers: tuple[str, ...],
    sizes: tuple[sympy.Symbol, ...],
    comment: str,
    checks: tuple[str, ...],
) -> KernelSource:
    """Return the source, with its function named by `hint` and the text's hash."""
    prefix = re.sub(r"\W+", "_", hint)[:_HINT_CHARACTERS].strip("_") or "kernel"
    text = definitions_of(text) + text
    name = f"{prefix}_{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    return KernelSource(name, text.replace("KERNEL_NAME", name), buffers, sizes, comment, launch=checks)


def _argument_names(body: Body) -> dict[str, str]:
    """Map buffers to argument names: stored buffers (`out0` …), then those only read (`in0` …), each by first use."""
    stored = dict.fromkeys(store.buffer for store in body.stores)
    loaded = dict.fromkeys(load.buffer for load in body.loads() if load.buffer not in stored)
    names = {buffer: f"out{at}" for at, buffer in enumerate(stored)}
    names.update((buffer, f"in{at}") for at, buffer in enumerate(loaded))
    return names


register(CppGenerator())
