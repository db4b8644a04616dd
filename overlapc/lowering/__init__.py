"""ATen graphs to loop IR: `lower` walks a graph; one file a family of ops says how."""

from overlapc.lowering import foreach, indexing, pointwise, reduction, scan, view
from overlapc.lowering.graph import Communication, lower, provenance
from overlapc.lowering.table import LIBRARY_CALLS, lowered_ops

__all__ = [
    "LIBRARY_CALLS",
    "Communication",
    "foreach",
    "indexing",
    "lower",
    "lowered_ops",
    "pointwise",
    "provenance",
    "reduction",
    "scan",
    "view",
]
