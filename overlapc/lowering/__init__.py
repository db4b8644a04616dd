"""Lowers ATen graphs to loop IR: `lower` walks a graph, and each family of ops has a file with its lowering rules."""

from overlapc.lowering import (
    asserts,
    embedding,
    exchange,
    flex_attention,
    foreach,
    indexing,
    part,
    pointwise,
    product,
    random,
    reduction,
    scan,
    scatter,
    topk,
    view,
)
from overlapc.lowering.graph import Communication, lower
from overlapc.lowering.provenance import provenance
from overlapc.lowering.table import LIBRARY_CALLS, lowered_ops
from overlapc.lowering.target import Target

__all__ = [
    "LIBRARY_CALLS",
    "Communication",
    "Target",
    "asserts",
    "embedding",
    "exchange",
    "flex_attention",
    "foreach",
    "indexing",
    "lower",
    "lowered_ops",
    "part",
    "pointwise",
    "product",
    "provenance",
    "random",
    "reduction",
    "scan",
    "scatter",
    "topk",
    "view",
]
