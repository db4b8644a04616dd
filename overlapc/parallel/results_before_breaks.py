"""Copies what a graph passes on from before a graph break, where its backward has to reduce pending gradients."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from overlapc.fx.wrapped import memory_of
from overlapc.parallel.gather import reduce_with


def copy_results_that_reduce(gm: GraphModule) -> None:
    """Make `reduce_with` in Dynamo's graph take copies of tensors that lie in the memory of the graph's inputs.

    This is where a module's output was computed before a graph break. AOTAutograd replays a result that is a view of an
    input outside of the graph's autograd node, so a backward from it would not run that of `reduce_with`.
    """
    found = gm.graph.find_nodes(op="call_function", target=reduce_with)
    if not found:
        return
    inputs = {memory for node in gm.graph.find_nodes(op="placeholder") for memory in memory_of(node)}
    for node in found:
        outputs, *others = node.args
        with gm.graph.inserting_before(node):
            own = [_copied(output) if inputs & memory_of(output) else output for output in outputs]
        node.args = (own, *others)
    gm.recompile()


def _copied(node: Node) -> Node:
    copy = node.graph.call_function(torch.clone, (node,))
    copy.meta = {**node.meta, "example_value": node.meta["example_value"].clone()}
    return copy
