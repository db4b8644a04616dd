"""The graphs that conditionals and loops carry: branches of `torch.cond`, condition and body of `while_loop`.

Each is a graph of ATen ops like the one around it, with everything it needs as arguments, and is compiled as one.
Other higher-order ops keep theirs as they are: `flex_attention` maps its score function over indices, for one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

_CARRIERS = frozenset({"cond", "while_loop", "invoke_subgraph"})


@dataclass(frozen=True, slots=True)
class Subgraph:
    """`reader` runs `module`, which `node` of the graph around it names."""

    node: Node
    reader: Node
    module: GraphModule

    @property
    def name(self) -> str:
        """Name of its attribute, such as "true_graph_0"."""
        return str(self.node.target)


def subgraphs(gm: GraphModule) -> Iterator[Subgraph]:
    """Every nested graph of `gm` that can be compiled on its own, in order."""
    for node in gm.graph.find_nodes(op="get_attr"):
        readers = [reader for reader in node.users if carries_graphs(reader)]
        module = carried(node)
        if module is not None and readers and len(readers) == len(node.users) and _described(module):
            yield Subgraph(node, readers[0], module)


def carries_graphs(node: Node) -> bool:
    """Whether `node` is a conditional, a loop or a call whose graphs run as they are, on tensors."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() in _CARRIERS


def carried(node: Node) -> GraphModule | None:
    """The graph that a `get_attr` node names, if it names one."""
    found = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    return found if isinstance(found, GraphModule) else None


def nodes_within(node: Node) -> Iterator[Node]:
    """All nodes of all graphs among the arguments of `node`, at any depth."""
    for argument in node.all_input_nodes if node.op == "call_function" else ():
        module = carried(argument)
        if module is not None:
            for inner in module.graph.nodes:
                yield inner
                yield from nodes_within(inner)


def is_loop(node: Node) -> bool:
    """Whether `node` runs its graphs as often as the data say."""
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "while_loop"


def return_tuple(module: GraphModule) -> bool:
    """Let the graph return a tuple, as every graph that is compiled; True where it returned one value bare."""
    output = module.graph.output_node()
    if isinstance(output.args[0], tuple | list):
        return False
    output.args = ((output.args[0],),)
    module.recompile()
    return True


def _described(module: GraphModule) -> bool:
    """Whether every argument has metadata, as the arguments of a graph must."""
    return all("val" in node.meta for node in module.graph.find_nodes(op="placeholder"))
