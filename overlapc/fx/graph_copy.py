"""Copies of FX graphs, for who rewrites one and may need it as it was."""

from __future__ import annotations

from torch.fx import Graph


def copied(graph: Graph) -> Graph:
    """The same nodes once more."""
    copy = Graph()
    copy.output(copy.graph_copy(graph, {})).meta = dict(graph.output_node().meta)
    return copy
