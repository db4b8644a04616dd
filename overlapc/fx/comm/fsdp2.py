"""Clean-up of graphs that carry FSDP2's own ops."""

from __future__ import annotations

from torch import fx

from overlapc.fx.comm.flat_buckets import split_buckets
from overlapc.fx.comm.unsharded import remove_fills


def clean_up(graph_module: fx.GraphModule) -> int:
    """Remove resizes of storage, and split flat buckets; return the number of replaced ops.

    Runs before `canonicalize`, after which the graph is as if `overlapc.fully_shard` had written it.
    """
    replaced = remove_fills(graph_module.graph) + split_buckets(graph_module.graph)
    if replaced:
        graph_module.graph.eliminate_dead_code()
        graph_module.graph.lint()
        graph_module.recompile()
    return replaced
