"""Copies of FX graphs, for code that rewrites a graph and may still need the original."""

from __future__ import annotations

from torch.fx import Graph


def copied(graph: Graph) -> Graph:
    """Return a copy of `graph`."""
    copy = Graph()
    copy.output(copy.graph_copy(graph, {})).meta = dict(graph.output_node().meta)
    return copy
