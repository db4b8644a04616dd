"""Times kernels while a graph is fused (`benchmark_fusion`): a fusion is kept only if it is faster."""

from __future__ import annotations

from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.codegen import trial
from overlapc.codegen.generators import generator_for
from overlapc.estimators.calibration.clock import clock_for, compute_ns
from overlapc.fusion.fuse import KernelTiming
from overlapc.ir.ops import Loops, LoweredGraph


class KernelTimes:
    """Compiles and times kernels of one graph on buffers of zeros; equal kernels are measured once."""

    def __init__(self, graph: LoweredGraph, cache_dir: Path) -> None:
        self.graph = graph
        self.cache_dir = cache_dir
        self.known: dict[str, KernelTiming] = {}  # by the name of the source, which is derived from its contents

    def __call__(self, op: Loops) -> KernelTiming | str:
        """Return the time of the kernel of `op`, including its launch where the launch is not hidden, or the reason why
        no kernel is generated for it. ToolchainError if it does not compile."""
        generator = generator_for(op.device.type)
        reason = generator.refuse(op.body) or trial.refuse(op.body)
        if reason is not None:
            return reason
        source = generator.generate(op.body, "trial", size_hints=self.graph.size_hints)
        if source.name not in self.known:
            launcher = generator.load([source], self.cache_dir)[source.name]
            sizes = [self.graph.hint(symbol) for symbol in source.sizes]
            with _disable_current_modes(), torch.device(op.device):  # torch compiles under a fake tensor mode
                memory = {root: self._memory(root) for root in map(self.graph.root, source.buffers)}
                tensors = [memory[self.graph.root(name)] for name in source.buffers]
                ns = compute_ns(clock_for(op.device), lambda: launcher(*tensors, *sizes))
            self.known[source.name] = KernelTiming(ns, getattr(launcher, "spills", 0))
        return self.known[source.name]

    def _memory(self, root: str) -> torch.Tensor:
        layout = self.graph.views[root].layout
        return torch.zeros(self.graph.hint(layout.storage_numel()), dtype=layout.dtype)
