"""Compiles many bodies with the C++ generator in one call."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from overlapc.codegen.cpp import CppGenerator
from overlapc.codegen.generators import KernelSource
from overlapc.ir.body import Body


class Kernels:
    """The kernels of many bodies, compiled in one call as those of a graph are."""

    def __init__(self, bodies: Mapping[str, Body | Callable[[], Body]], cache_dir: Path) -> None:
        generator = CppGenerator()
        self.sources: dict[str, KernelSource] = {}
        for name, body in bodies.items():
            self.sources[name] = generator.generate(body if isinstance(body, Body) else body(), name)
        self.launchers = generator.load(list(self.sources.values()), cache_dir)

    def whole_vectors(self, name: str) -> str:
        """Return a kernel's text without the last iterations of loops, which repeat their contents with conditions."""
        lines, until = [], -1  # indentation of the block that is left out
        for line in self.sources[name].text.splitlines():
            depth = len(line) - len(line.lstrip())
            if until < 0 and re.match(r"\s*if \(whole\d+ < ", line):
                until = depth
            elif until < 0:
                lines.append(line)
            elif depth == until:
                until = -1
        return "\n".join(lines)

    def run(self, name: str, tensors: Mapping[str, torch.Tensor], **sizes: int) -> None:
        """Launch a kernel; `tensors` has inputs and outputs by the names of the body's buffers."""
        source = self.sources[name]
        arguments = [tensors[buffer] for buffer in source.buffers]
        self.launchers[source.name](*arguments, *(sizes[str(symbol)] for symbol in source.sizes))
