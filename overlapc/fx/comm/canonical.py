"""Brings functional collectives into a canonical form: each launch has its wait.

In a graph after `canonicalize`,

- every collective is a `_c10d_functional` op whose result is read only through one `wait_tensor` (through one for each
  output, in the coalesced, list-valued forms), and so is the result of any other op that the program waits for,
- there are no waits for values that cannot be in flight, no duplicate gathers, and the gradients of one parameter are
  added up before they are reduced,
- there are no aliases, and no views of their input's shape, except those that the graph returns,
- `_dtensor.shard_dim_alltoall`, in-place forms, point-to-point and custom ops are unchanged: they are synchronous or of
  unknown kind (`Collective.waits` is empty). The first only launches a collective and waits for it; the scheduler
  treats the others as barriers, unless the user declares them safe.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from overlapc.fx.comm.collectives import outputs_of
from overlapc.fx.comm.communication import WAIT, is_asynchronous, is_wait, op_of
from overlapc.fx.comm.gathers import merge_gathers, merge_reductions
from overlapc.fx.control import done
from overlapc.fx.sizes import same_sizes

_VIEWS: tuple[Any, ...] = (
    torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default,
)  # fmt: skip


def canonicalize(graph_module: fx.GraphModule) -> int:
    """Bring all collectives of the graph into canonical form; return the number of changed nodes."""
    graph = graph_module.graph
    changed = _plain_ops(graph) + _drop_identity_views(graph)
    changed += _one_wait_each(graph)
    changed += merge_gathers(graph)
    changed += merge_reductions(graph)
    if changed:
        graph.lint()
        graph_module.recompile()
    return changed


def _plain_ops(graph: fx.Graph) -> int:
    """Replace ops of the autograd namespace that survived tracing by the plain ones, which are equal below autograd."""
    changed = 0
    for node in graph.nodes:
        namespace, name = op_of(node)
        if namespace == "_c10d_functional_autograd":
            node.target = getattr(torch.ops._c10d_functional, name).default
            changed += 1
    return changed


def _drop_identity_views(graph: fx.Graph) -> int:
    """Remove views that have their input's shape, and aliases.

    `DTensor.to_local` leaves such a view before every gather. Autograd makes aliases of saved tensors, and some only if
    something else refers to a tensor, such as a thread that samples stacks: graphs of ranks would differ.
    """
    changed = 0
    for node in (each for view in _VIEWS for each in graph.find_nodes(op="call_function", target=view)):
        source = node.args[0]
        if any(user.op == "output" for user in node.users):
            continue  # AOTAutograd has already decided which outputs alias which inputs
        before, after = source.meta.get("val"), node.meta.get("val")
        if isinstance(before, Tensor) and isinstance(after, Tensor) and same_sizes(before.shape, after.shape):
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            changed += 1
    return changed


def _computing(node: fx.Node) -> fx.Node:
    """Return the node that computed the memory of `node`: the one behind views and behind one of several results."""
    while node.target is operator.getitem or getattr(node.target, "is_view", False):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _settled(node: fx.Node) -> bool:
    """Whether the value of `node` cannot be in flight, because it was waited for, or computed by an ordinary op.

    An input may be in flight (launched before the graph), and so may the result of a custom op.
    """
    return is_wait(node) or op_of(node)[0] in ("aten", "prims")


def _one_wait_each(graph: fx.Graph) -> int:
    changed = 0
    for node in list(graph.nodes):
        if not is_wait(node):
            continue
        launch = _computing(node.args[0])
        # The wait of a viewed launch is added below, before the view.
        if _settled(launch) or (is_asynchronous(launch) and node.args[0] not in outputs_of(launch)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            changed += 1
    in_flight = [output for node in graph.nodes if is_asynchronous(node) for output in outputs_of(node)]
    waited = [node.args[0] for node in graph.nodes if is_wait(node) and node.args[0].op != "placeholder"]
    changed += sum(_wait_once(graph, output) for output in dict.fromkeys((*in_flight, *waited)))
    first_wait: dict[fx.Node, fx.Node] = {}  # by input; an input may also be read without waiting
    for node in list(graph.nodes):
        if is_wait(node) and node.args[0].op == "placeholder":
            first = first_wait.setdefault(node.args[0], node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
                changed += 1
    return changed


def _wait_once(graph: fx.Graph, output: fx.Node) -> int:
    """Make all readers of `output` read it through one wait; unless it has exactly that, insert the wait after it."""
    users = [user for user in output.users if user.target is not done]  # `done` needs the launch, not the result
    if len(users) == 1 and is_wait(users[0]):
        return 0
    with graph.inserting_after(output):
        wait = graph.call_function(WAIT, (output,))
    wait.meta = dict(output.meta)
    output.replace_all_uses_with(wait, delete_user_cb=lambda user: user is not wait and user.target is not done)
    for old in users:
        if is_wait(old):
            wait.meta = dict(old.meta)
            old.replace_all_uses_with(wait)
            graph.erase_node(old)
    return 1


def drop_unread(graph_module: fx.GraphModule) -> int:
    """Remove collectives whose results are not read; only for a graph that is known to be the same on all ranks.

    Another rank may read the result of its own launch, and would wait for this rank. The wait for an in-place
    collective stays, because readers of the mutated tensor rely on it.
    """
    changed = 0
    for node in reversed(list(graph_module.graph.nodes)):
        of_launch = is_wait(node) or node.target is operator.getitem
        launch = _computing(node.args[0]) if of_launch else node
        if not node.users and is_asynchronous(launch):
            graph_module.graph.erase_node(node)
            changed += 1
    if changed:
        graph_module.recompile()
    return changed
