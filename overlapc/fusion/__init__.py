"""From lowered ops to fused kernels."""

from __future__ import annotations

from overlapc.fusion.deps import without_dead_ops
from overlapc.fusion.fuse import FusionReport, fuse
from overlapc.fusion.inline import inline
from overlapc.ir.ops import IROp, LoweredGraph

__all__ = ["FusionReport", "fuse_ops"]


def fuse_ops(graph: LoweredGraph, enabled: bool = True) -> tuple[list[IROp], FusionReport]:
    """The live ops of `graph`, fused where that saves memory traffic, and the account of it."""
    ops = without_dead_ops(graph)
    if not enabled:
        return ops, FusionReport()
    return fuse(inline(ops, graph), graph)
