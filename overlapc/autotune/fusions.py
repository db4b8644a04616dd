"""Kernels timed while a graph is being fused, for `benchmark_fusion`: a fusion stays only if it is faster."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.codegen.generators import generator_for
from overlapc.estimators.calibration.clock import clock_for, compute_ns
from overlapc.fusion.fuse import KernelTiming
from overlapc.ir.ops import Loops, LoweredGraph


class KernelTimes:
    """Compiles and runs kernels of one graph on memory of their buffers' sizes, zeros all; equal ones once."""

    def __init__(self, graph: LoweredGraph, cache_dir: Path) -> None:
        self.graph = graph
        self.cache_dir = cache_dir
        self.known: dict[str, KernelTiming] = {}  # by the name of the source, which says what it does

    def __call__(self, op: Loops) -> KernelTiming | str:
        """Its time, launch included where nothing hides it; or why there is none. ToolchainError if it fails."""
        generator = generator_for(op.device.type)
        reason = generator.refuse(op.body)
        if reason is not None:
            return reason
        source = generator.generate(op.body, "trial", size_hints=self.graph.size_hints)
        if source.name not in self.known:
            launcher = generator.load([source], self.cache_dir)[source.name]
            sizes = [self.graph.hint(symbol) for symbol in source.sizes]
            with _disable_current_modes(), torch.device(op.device):  # a compiler runs among fake tensors
                memory = {root: self._memory(root) for root in map(self.graph.root, source.buffers)}
                tensors = [memory[self.graph.root(name)] for name in source.buffers]
                ns = compute_ns(clock_for(op.device), lambda: launcher(*tensors, *sizes))
            self.known[source.name] = KernelTiming(ns, getattr(launcher, "spills", 0))
        return self.known[source.name]

    def _memory(self, root: str) -> torch.Tensor:
        layout = self.graph.views[root].layout
        return torch.zeros(self.graph.hint(layout.storage_numel()), dtype=layout.dtype)
