"""Fuses lowered ops into kernels."""

from __future__ import annotations

from collections.abc import Collection

from overlapc.fusion.combo import combine
from overlapc.fusion.deps import without_dead_ops
from overlapc.fusion.fuse import Measure
from overlapc.fusion.fuse import fuse as fuse_kernels  # `overlapc.fusion.fuse` is the module
from overlapc.fusion.inline import inline as inline_kernels
from overlapc.fusion.live import Beside, nothing_beside
from overlapc.fusion.report import FusionReport
from overlapc.ir.ops import IROp, LoweredGraph, Refuse, nothing_refused

__all__ = ["Beside", "FusionReport", "combine", "fuse_before_combining", "fuse_ops"]


def fuse_ops(
    graph: LoweredGraph,
    enabled: bool = True,
    freeable: Collection[str] = (),
    seed: int | None = None,
    measure: Measure | None = None,
    refuse: Refuse = nothing_refused,
    alone: Collection[str] = (),
) -> tuple[list[IROp], FusionReport]:
    """Return the live ops of `graph`, fused where that saves memory traffic, and a report of fusions and refusals.

    freeable: inputs whose memory is freed after their last reader.
    seed: try fusions in random order (for tests).
    measure: times kernels, so that only fusions that are faster are done.
    refuse: why the device's generator cannot generate a kernel, or None; refused kernels are not created.
    alone: nodes whose kernels share no launch with others.
    """
    if not enabled:
        return without_dead_ops(graph), FusionReport()
    ops, report = fuse_before_combining(graph, freeable, seed, measure, refuse)
    return combine(ops, graph, report, freeable, alone), report


def fuse_before_combining(
    graph: LoweredGraph,
    freeable: Collection[str] = (),
    seed: int | None = None,
    measure: Measure | None = None,
    refuse: Refuse = nothing_refused,
    beside: Beside = nothing_beside,
) -> tuple[list[IROp], FusionReport]:
    """Fuse as `fuse_ops`, without launches of several kernels, for which `combine` needs all kernels of a step.

    beside: memory in use beside that of the graph's ops.
    """
    inlined = inline_kernels(without_dead_ops(graph), graph, refuse)
    return fuse_kernels(inlined, graph, freeable, seed, measure, refuse, beside)
