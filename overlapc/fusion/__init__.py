"""Fuses lowered ops into kernels."""

from __future__ import annotations

from collections.abc import Collection

from overlapc.fusion.deps import without_dead_ops
from overlapc.fusion.fuse import Measure
from overlapc.fusion.fuse import fuse as fuse_kernels  # `overlapc.fusion.fuse` is the module
from overlapc.fusion.inline import inline as inline_kernels
from overlapc.fusion.report import FusionReport
from overlapc.ir.ops import IROp, LoweredGraph, Refuse, nothing_refused

__all__ = ["FusionReport", "fuse_ops"]


def fuse_ops(
    graph: LoweredGraph,
    enabled: bool = True,
    freeable: Collection[str] = (),
    seed: int | None = None,
    measure: Measure | None = None,
    refuse: Refuse = nothing_refused,
) -> tuple[list[IROp], FusionReport]:
    """Return the live ops of `graph`, fused where that saves memory traffic, and a report of fusions and refusals.

    freeable: inputs whose memory is freed after their last reader.
    seed: try fusions in random order (for tests).
    measure: times kernels, so that only fusions that are faster are done.
    refuse: why the device's generator cannot generate a kernel, or None; refused kernels are not created.
    """
    ops = without_dead_ops(graph)
    if not enabled:
        return ops, FusionReport()
    inlined = inline_kernels(ops, graph, refuse)
    return fuse_kernels(inlined, graph, freeable, seed, combos=True, measure=measure, refuse=refuse)
