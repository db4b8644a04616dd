"""Order that a graph demands beyond data dependences: torch's `control_deps(earlier, subgraph, *args)`.

torch wraps an op in this way to make it run after ops whose results it does not read: waits for streams and events, and
decisions of earlier passes. `inline_control_deps` puts the wrapped ops back into the graph, behind a node
`done(*earlier)` whose arguments are the nodes that must run before them. Because these are arguments, every rewrite of
the graph updates them. `order_of` returns the `done` node that a node must follow.
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
    """Return the `done` node that `node` must follow, or None."""
    return node.meta.get(_KEY)


def inline_control_deps(gm: GraphModule) -> int:
    """Move every wrapped op into the graph itself, marked with its `done`; return the number of unwrapped ops."""
    wrapped = [node for node in gm.graph.nodes if _is_control_deps(node)]
    for node in wrapped:
        _unwrap(gm, node)
    if wrapped:
        gm.graph.lint()
        gm.recompile()
    return len(wrapped)


def _is_control_deps(node: Node) -> bool:
    # Compared by name, because torch registers the op only when Inductor, which defines it, is imported.
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
    """Copy the nodes of `inner` to the insert point of `graph`, each marked with `mark`; return its results."""
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
