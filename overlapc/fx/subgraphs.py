"""Nested graphs of conditionals and loops: branches of `torch.cond`, condition and body of `while_loop`.

Each is a graph of ATen ops like the enclosing one, takes everything it reads as arguments, and is compiled on its own.
The graphs of other higher-order ops are not compiled: `flex_attention`, for example, maps its score function over
indices.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

_CARRIERS = frozenset({"cond", "while_loop", "invoke_subgraph"})


@dataclass(frozen=True, slots=True)
class Subgraph:
    """A nested graph `module`, with the `get_attr` node that names it and the node `reader` that runs it."""

    node: Node
    reader: Node
    module: GraphModule

    @property
    def name(self) -> str:
        """The name of the attribute that holds it, such as "true_graph_0"."""
        return str(self.node.target)


def subgraphs(gm: GraphModule) -> Iterator[Subgraph]:
    """Return the nested graphs of `gm` that can be compiled on their own, in order."""
    for node in gm.graph.find_nodes(op="get_attr"):
        readers = [reader for reader in node.users if carries_graphs(reader)]
        module = carried(node)
        if module is not None and readers and len(readers) == len(node.users) and _described(module):
            yield Subgraph(node, readers[0], module)


def carries_graphs(node: Node) -> bool:
    """Whether `node` is a conditional, a loop or a call, which run their graphs on the tensors they are given."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _CARRIERS


def carried(node: Node) -> GraphModule | None:
    """Return the graph that a `get_attr` node names; None for any other node."""
    found = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, GraphModule) else None


def nodes_within(node: Node) -> Iterator[Node]:
    """Return all nodes of the graphs among the arguments of `node`, at any depth."""
    for argument in node.all_input_nodes if node.op == "call_function" else ():
        module = carried(argument)
        if module is not None:
            for inner in module.graph.nodes:
                yield inner
                yield from nodes_within(inner)


def is_loop(node: Node) -> bool:
    """Whether `node` is a loop, whose number of iterations depends on data."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "while_loop"


def return_tuple(module: GraphModule) -> bool:
    """Make the graph return a tuple, as every compiled graph must; return True if it returned a single bare value."""
    output = module.graph.output_node()
    if isinstance(output.args[0], tuple | list):
        return False
    output.args = ((output.args[0],),)
    module.recompile()
    return True


def _described(module: GraphModule) -> bool:
    """Whether every argument has a fake value in its metadata, which compilation needs."""
    return all("val" in node.meta for node in module.graph.find_nodes(op="placeholder"))
