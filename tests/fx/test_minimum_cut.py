"""The minimum cut in parts is the cut that NetworkX finds."""

from __future__ import annotations

import math

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapc.fx.partitioning import minimum_cut
from overlapc.fx.partitioning.minimum_cut import cut_in_parts

CAPACITIES = st.sampled_from((1.0, 2.0, 3.0, math.inf, math.inf))  # few, so that there are several minimum cuts
EDGES = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 11), CAPACITIES), max_size=30)


def graph_of(edges: list[tuple[int, int, float]]) -> networkx.DiGraph:
    """Return a graph from node 0 to node 11; infinite edges have no capacity, as in the graphs of torch."""
    graph = networkx.DiGraph()
    graph.add_nodes_from(range(12))
    for one, other, capacity in edges:
        if one != other:
            graph.add_edge(one, other, **({} if math.isinf(capacity) else {"capacity": capacity}))
    return graph


@given(EDGES)
def test_the_cut_is_that_of_networkx(edges):
    graph = graph_of(edges)
    try:
        expected = networkx.minimum_cut(graph, 0, 11)
    except networkx.NetworkXUnbounded:
        expected = None
    with cut_in_parts():
        if expected is None:
            with pytest.raises(networkx.NetworkXUnbounded):
                networkx.minimum_cut(graph, 0, 11)
        else:
            assert networkx.minimum_cut(graph, 0, 11) == expected


def test_equal_parts_are_cut_once(monkeypatch):
    graph = networkx.DiGraph()
    for layer in range(50):
        graph.add_edge("source", f"product {layer}")
        graph.add_edge(f"product {layer}", f"activation {layer}", capacity=4)
        graph.add_edge(f"activation {layer}", f"gradient {layer}", capacity=2 + layer % 2)
        graph.add_edge(f"gradient {layer}", "sink")
    cut, computed = minimum_cut._cut, []
    monkeypatch.setattr(minimum_cut, "_cut", lambda part: computed.append(part) or cut(part))
    with cut_in_parts():
        value, (saved, _) = networkx.minimum_cut(graph, "source", "sink")
    assert value == 50 * 2.5
    assert len(saved) == 1 + 50 * 2
    assert len(computed) == 2  # one for each capacity
