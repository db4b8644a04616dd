"""Helpers of the C++ generator's tests: symbols, common sizes, and bodies compiled all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import sympy
import torch

from overlapc.codegen.cpp import CppGenerator
from overlapc.codegen.kernel import KernelSource
from overlapc.ir.body import Body, Loop
from overlapc.ir.indexing import loop_symbol

p0, p1, p2 = (loop_symbol("p", at) for at in range(3))
r0, r1 = (loop_symbol("r", at) for at in range(2))
i0, i1 = (loop_symbol("i", at) for at in range(2))
s0, s1 = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))


def loop(symbol: sympy.Symbol, size: int | sympy.Expr) -> Loop:
    return Loop(symbol, sympy.sympify(size))


class Kernels:
    """Kernels of many bodies, compiled in one call as for a graph."""

    def __init__(self, bodies: Mapping[str, Body | Callable[[], Body]], cache_dir: Path) -> None:
        generator = CppGenerator()
        self.sources: dict[str, KernelSource] = {}
        for name, body in bodies.items():
            self.sources[name] = generator.generate(body if isinstance(body, Body) else body(), name)
        self.launchers = generator.load(list(self.sources.values()), cache_dir)

    def run(self, name: str, tensors: Mapping[str, torch.Tensor], **sizes: int) -> None:
        """Launches the kernel; outputs are among `tensors`, by the names of the body's buffers."""
        source = self.sources[name]
        arguments = [tensors[buffer] for buffer in source.buffers]
        self.launchers[source.name](*arguments, *(sizes[str(symbol)] for symbol in source.sizes))
