"""Computes the min-cut of torch's partitioner piecewise, and once for equal pieces.

    source ∞→ a 3→ b ∞→ c 2→ d ∞→ sink         no finite cut separates a from the source, or d from the sink:
 -> source 3→ (b ∞→ c) 2→ sink                 what only source and sink connect are parts, which are cut separately

In the graph of a model, such parts are small, and most are equal to one of another layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

from overlapc.fx.versions.changes import replaced

Node = str
Edge = tuple[Node, Node, float]  # from, to, capacity
Part = tuple[tuple[int, int, float], ...]  # edges between numbered nodes

_SOURCE, _SINK = 0, 1  # their numbers in a part; its other nodes are numbered from 2


def cut_in_parts() -> AbstractContextManager[None]:
    """Return a context in which torch's partitioner finds its minimum cut in parts."""
    import networkx  # not at the top: importing it takes a tenth of a second

    return replaced(networkx, minimum_cut=minimum_cut)


def minimum_cut(graph: Any, source: Node, sink: Node) -> tuple[float, tuple[set[Node], set[Node]]]:
    """Return the value of the minimum cut of a NetworkX DiGraph, its nodes on the side of the source and of the sink.

    It is the cut that NetworkX's function of this name returns: of several with the least value, the one with the
    fewest nodes on the side of the sink. Edges without a capacity are infinite; NetworkXUnbounded if no cut is finite.
    """
    from networkx import NetworkXUnbounded

    edges = [(one, other, about.get("capacity", math.inf)) for one, other, about in graph.edges(data=True)]
    with_source = _reached(source, ((one, other) for one, other, capacity in edges if math.isinf(capacity)))
    with_sink = _reached(sink, ((other, one) for one, other, capacity in edges if math.isinf(capacity)))
    if not with_source.isdisjoint(with_sink):
        raise NetworkXUnbounded("a path of infinite edges leads from the source to the sink")
    total, on_side_of_sink = 0.0, set(with_sink)
    cuts: dict[Part, tuple[float, set[int]]] = {}
    for nodes, part in _parts(edges, with_source, with_sink):
        if part not in cuts:
            cuts[part] = _cut(part)
        value, numbers = cuts[part]
        total += value
        on_side_of_sink.update(node for number, node in enumerate(nodes, _SINK + 1) if number in numbers)
    return total, (set(graph) - on_side_of_sink, on_side_of_sink)


def _reached(start: Node, edges: Iterable[tuple[Node, Node]]) -> set[Node]:
    """Return `start` and all nodes to which `edges` lead from it."""
    following: dict[Node, list[Node]] = {}
    for one, other in edges:
        following.setdefault(one, []).append(other)
    reached, waiting = {start}, [start]
    while waiting:
        for other in following.get(waiting.pop(), ()):
            if other not in reached:
                reached.add(other)
                waiting.append(other)
    return reached


def _parts(
    edges: Sequence[Edge], with_source: set[Node], with_sink: set[Node]
) -> Iterator[tuple[Sequence[Node], Part]]:
    """Yield each part of a graph, as its nodes other than source and sink in the order of their numbers, and edges."""
    above: dict[Node, Node] = {}  # a forest with a tree for each part

    def root(node: Node) -> Node:
        while (parent := above.setdefault(node, node)) != node:
            above[node] = node = above[parent]
        return node

    def ends(edge: Edge) -> list[Node]:
        return [node for node in edge[:2] if node not in with_source and node not in with_sink]

    # Edges that lead to the source's side, or from the sink's, are never cut.
    edges = [edge for edge in edges if edge[0] not in with_sink and edge[1] not in with_source]
    for edge in edges:
        if len(inner := ends(edge)) == 2:
            above[root(inner[0])] = root(inner[1])
    numbers: dict[Node | None, dict[Node, int]] = {}  # root of a part -> the numbers of its nodes
    parts: dict[Node | None, list[tuple[int, int, float]]] = {}
    for edge in edges:
        inner = ends(edge)
        part = root(inner[0]) if inner else None
        known = numbers.setdefault(part, {})
        for node in inner:
            known.setdefault(node, len(known) + _SINK + 1)
        one, other, capacity = edge
        parts.setdefault(part, []).append((known.get(one, _SOURCE), known.get(other, _SINK), capacity))
    for part, found in parts.items():
        yield list(numbers[part]), tuple(found)


def _cut(part: Part) -> tuple[float, set[int]]:
    """Return the value of the minimum cut of a part, and its nodes on the side of the sink."""
    from networkx import DiGraph
    from networkx.algorithms.flow import boykov_kolmogorov
    from networkx.algorithms.flow import minimum_cut as cut_of  # not the one that `cut_in_parts` replaces

    graph = DiGraph()
    graph.add_nodes_from((_SOURCE, _SINK))
    for one, other, capacity in part:
        before = graph[one][other]["capacity"] if graph.has_edge(one, other) else 0.0
        graph.add_edge(one, other, capacity=before + capacity)
    value, (_, on_side_of_sink) = cut_of(graph, _SOURCE, _SINK, flow_func=boykov_kolmogorov)
    return value, on_side_of_sink
