"""Results whose backward has to reduce pending gradients (`gather.reduce_with`)."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule, Node

from overlapc.fx.captured.in_place import changed_by
from overlapc.fx.captured.wrapped import memory_of
from overlapc.parallel.gather import reduce_with


def copy_results_that_reduce(gm: GraphModule) -> None:
    """Copy in Dynamo's graph what `reduce_with` could not return as it is, or what could not be changed afterwards.

    A tensor in the memory of the graph's inputs was computed before a graph break. AOTAutograd replays a result that is
    a view of an input outside of the graph's autograd node, so a backward from it would not run that of `reduce_with`.

    What `reduce_with` returns is a view that an autograd function made. Such a view may not be changed in place.
    """
    found = gm.graph.find_nodes(op="call_function", target=reduce_with)
    if not found:
        return
    inputs = {memory for node in gm.graph.find_nodes(op="placeholder") for memory in memory_of(node)}
    changed = {memory for node in gm.graph.nodes for each in changed_by(node) for memory in memory_of(each)}
    for node in found:
        outputs, *others = node.args
        with gm.graph.inserting_before(node):
            own = [_copied(output) if inputs & memory_of(output) else output for output in outputs]
        node.args = (own, *others)
        for result in [each for each in node.users if changed & memory_of(each)]:
            with gm.graph.inserting_after(result):
                copy = _copied(result)
            result.replace_all_uses_with(copy, lambda user, copy=copy: user is not copy)
            # Views of the result are views of the copy now.
            copy.meta["example_value"], result.meta["example_value"] = (
                each.meta["example_value"] for each in (result, copy)
            )
    gm.recompile()


def only_reduces(gm: GraphModule) -> bool:
    """Whether Dynamo's graph computes nothing: the results whose backward reduces come from code before a graph break.

    Such a graph should run eagerly. A backward that AOTAutograd made passes zeros to results that the loss does not
    depend on, where eager passes nothing to the code before the break.
    """
    if not gm.graph.find_nodes(op="call_function", target=reduce_with):
        return False
    known = (reduce_with, operator.getitem)
    return all(node.op in ("placeholder", "output") or node.target in known for node in gm.graph.nodes)


def copy_all_results(gm: GraphModule) -> GraphModule:
    """Copy what `gm` returns, so that the caller may change it in place; return `gm`."""
    (output,) = gm.graph.find_nodes(op="output")
    with gm.graph.inserting_before(output):
        output.args = (tuple(gm.graph.call_function(torch.clone, (result,)) for result in output.args[0]),)
    gm.recompile()
    return gm


def _copied(node: Node) -> Node:
    copy = node.graph.call_function(torch.clone, (node,))
    copy.meta = {**node.meta, "example_value": node.meta["example_value"].clone()}
    return copy
