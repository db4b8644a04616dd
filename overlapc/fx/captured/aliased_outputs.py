"""Takes results that are views of other results out of a graph whose parameters are DTensors.

AOTAutograd rejects graphs with such results (torch 2.11 to 2.13: "ANY output aliasing ... is currently unsupported"),
but they are common at graph breaks: the code after a break often needs a tensor and a view of it. The rewritten graph
returns only the tensor, and the view nodes run outside of the graph.

    h = linear(x); flat = h.view(-1, 8); return (h, flat, loss)
 -> h = linear(x); return (h, loss)   and, run eagerly after it:   flat = h.view(-1, 8)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.multiprocessing.reductions import StorageWeakRef

from overlapc.fx.captured.wrapped import memory_of

Results = Callable[[Sequence[Any]], Sequence[Any]]


def views_outside(gm: GraphModule) -> Results | None:
    """Remove results that are views of other results from the graph that Dynamo captured, in place.

    Return a function that computes the original results from the new ones; None if `gm` is unchanged, because no two
    differentiable results share memory, or none of those is a view of another tensor of the graph.
    """
    output = gm.graph.output_node()
    results = [value for value in output.args[0] if isinstance(value, Node)]  # type: ignore[union-attr]
    chains = {node: chain for shared in _sharing(results) for node, chain in _chains(shared).items()}
    if not chains:
        return None
    outside = {node for chain in chains.values() for node in chain}
    # The new results: the remaining ones, and the tensors and symbolic sizes that the removed views read.
    read = [argument for node in outside for argument in node.all_input_nodes]
    kept = [node for node in dict.fromkeys((*results, *read)) if node not in outside]
    replay = _graph_of(gm, kept, [node for node in gm.graph.nodes if node in outside], output.args[0])
    output.args = (tuple(kept),)
    for node in reversed(list(gm.graph.nodes)):
        if node in outside and not node.users:
            gm.graph.erase_node(node)
    gm.recompile()
    return lambda given: replay(*given)


def _sharing(results: Iterable[Node]) -> list[list[Node]]:
    """Return the groups of differentiable results that share memory."""
    by_memory: dict[frozenset[StorageWeakRef], list[Node]] = {}
    for node in dict.fromkeys(results):
        memory = memory_of(node)
        if memory and node.meta["example_value"].requires_grad:
            by_memory.setdefault(memory, []).append(node)
    return [nodes for nodes in by_memory.values() if len(nodes) > 1]


def _chains(shared: Sequence[Node]) -> dict[Node, list[Node]]:
    """Return, for each result, the views that compute it from the common base of `shared`; empty without a base."""
    chains = {node: _views_to(node) for node in shared}
    behind = {chain[-1].args[0] if chain else node for node, chain in chains.items()}
    (first, *others) = behind
    if others or first.op == "placeholder":  # type: ignore[union-attr]  # AOTAutograd knows how to alias inputs
        return {}
    return {node: chain for node, chain in chains.items() if chain}


def _views_to(node: Node) -> list[Node]:
    """Return the chain of view nodes from `node` to its base (excluded); each is a view of the next node's value."""
    chain: list[Node] = []
    while node.op in ("call_function", "call_method") and _is_view(node):
        chain.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return chain


def _is_view(node: Node) -> bool:
    name = node.target if isinstance(node.target, str) else node.target.__name__
    writes = name.endswith("_") or "out" in node.kwargs
    tensors = [each for each in node.all_input_nodes if isinstance(each.meta.get("example_value"), Tensor)]
    if writes or not node.args or tensors != [node.args[0]]:
        return False
    memory = memory_of(node)
    return bool(memory) and memory == memory_of(tensors[0])


def _graph_of(gm: GraphModule, given: Sequence[Node], views: Sequence[Node], results: Any) -> GraphModule:
    """Return a graph that computes `results` from the values of `given` with the nodes `views`."""
    graph = Graph()
    copies = {node: graph.placeholder(f"given_{at}") for at, node in enumerate(given)}
    for view in views:
        copies[view] = graph.node_copy(view, copies.__getitem__)
    graph.output(torch.fx.map_arg(results, copies.__getitem__))
    return GraphModule(gm, graph)
