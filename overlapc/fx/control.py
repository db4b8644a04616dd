"""Order that the graph asks for beyond its data: torch's `control_deps(earlier, subgraph, *args)`.

torch wraps an op in this way to make it run after ops whose results it does not read: waits for streams and events, and
decisions of earlier passes. `inline_control_deps` puts the wrapped ops back into the graph, behind a node
`done(*earlier)`, which names what must have run. As arguments, the earlier ops follow every rewrite of the
graph; `order_of` says for a node which `done` it stands behind.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import has_side_effect, map_arg

from overlapc.fx.subgraphs import carried

_KEY = "overlapc_after"


def done(*earlier: Any) -> None:
    """Marks the nodes after which a node must run; computes nothing."""


has_side_effect(done)


def order_of(node: Node) -> Node | None:
    """The `done` that `node` stands behind."""
    return node.meta.get(_KEY)


def inline_control_deps(gm: GraphModule) -> int:
    """Every wrapped op as a node of the graph itself, marked with its `done`; returns how many were unwrapped."""
    wrapped = [node for node in gm.graph.nodes if _is_control_deps(node)]
    for node in wrapped:
        _unwrap(gm, node)
    if wrapped:
        gm.graph.lint()
        gm.recompile()
    return len(wrapped)


def _is_control_deps(node: Node) -> bool:
    # By name: its module belongs to another backend, and is there only when that was imported.
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "control_deps"


def _unwrap(gm: GraphModule, node: Node) -> None:
    graph = gm.graph
    earlier, holder, *args = node.args
    assert isinstance(earlier, tuple | list)
    assert isinstance(holder, Node)
    inner = carried(holder)
    assert inner is not None, f"{node.name}: {holder.target} is no graph"
    with graph.inserting_before(node):
        mark = graph.call_function(done, tuple(earlier))
        results = _copied(graph, inner, args, mark)
    if isinstance(results, tuple | list):
        for user in list(node.users):
            assert user.target is operator.getitem, f"{node.name}: {user.name} reads several results as one"
            user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index]
            graph.erase_node(user)
    else:
        node.replace_all_uses_with(results)
    graph.erase_node(node)
    if not holder.users:
        graph.erase_node(holder)


def _copied(graph: Graph, inner: GraphModule, args: list[Any], mark: Node) -> Any:
    """The nodes of `inner` put at the insert point of `graph`, each marked; what `inner` returns."""
    now: dict[Node, Any] = dict(zip(inner.graph.find_nodes(op="placeholder"), args, strict=True))
    results: Any = None
    for node in inner.graph.nodes:
        if node.op == "output":
            results = map_arg(node.args[0], now.__getitem__)
        elif node.op != "placeholder":
            assert node.op == "call_function", f"{node.name}: {node.op} in a wrapped op"
            now[node] = graph.node_copy(node, now.__getitem__)
            now[node].meta[_KEY] = mark
    return results
