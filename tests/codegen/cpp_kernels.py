"""Bodies compiled by the C++ generator, all at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from overlapc.codegen.cpp import CppGenerator
from overlapc.codegen.generators import KernelSource
from overlapc.ir.body import Body


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
