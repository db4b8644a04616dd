"""Functional collectives made canonical: each launch paired with its wait.

`canonicalize` leaves a graph in which

- every collective is a `_c10d_functional` op whose result is read only through one `wait_tensor` (one an output
  for the coalesced, list-valued forms),
- no wait is left for a value that is not in flight, equal gathers exist once, and gradients of one parameter are added
  up before they are reduced,
- `_dtensor.shard_dim_alltoall`, in-place forms, point-to-point and custom ops stay as they are: they are
  synchronous, or of unknown kind (`Collective.waits` is empty). The first is a collective and its wait and no more; the
  scheduler treats the others as barriers, unless the user declares them safe.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from overlapc.fx.collectives import outputs_of
from overlapc.fx.communication import WAIT, is_asynchronous, is_wait, op_of
from overlapc.fx.control import done
from overlapc.fx.gathers import merge_gathers, merge_reductions

_VIEWS: frozenset[Any] = frozenset(
    {torch.ops.aten.view.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default}
)


def canonicalize(graph_module: fx.GraphModule) -> int:
    """Bring all collectives of the graph into the form above; returns how many nodes were changed."""
    graph = graph_module.graph
    changed = _plain_ops(graph) + _drop_identity_views(graph)
    changed += _one_wait_each(graph)
    changed += merge_gathers(graph)
    changed += merge_reductions(graph)
    changed += _drop_unread(graph)
    if changed:
        graph.lint()
        graph_module.recompile()
    return changed


def _plain_ops(graph: fx.Graph) -> int:
    """Below autograd an op of the autograd namespace, where one survived tracing, is the plain one."""
    changed = 0
    for node in graph.nodes:
        namespace, name = op_of(node)
        if namespace == "_c10d_functional_autograd":
            node.target = getattr(torch.ops._c10d_functional, name).default
            changed += 1
    return changed


def _drop_identity_views(graph: fx.Graph) -> int:
    """Removes views with their input's shape; `DTensor.to_local` leaves one before every gather."""
    changed = 0
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        source = node.args[0]
        if any(user.op == "output" for user in node.users):
            continue  # AOTAutograd has already decided which outputs alias which inputs
        before, after = source.meta.get("val"), node.meta.get("val")
        if isinstance(before, Tensor) and isinstance(after, Tensor) and before.shape == after.shape:
            node.replace_all_uses_with(source)
            graph.erase_node(node)
            changed += 1
    return changed


def _launch_of(value: Any) -> Any:
    """The launch of which `value` is a result, if that launch is coalesced; else `value`."""
    return value.args[0] if isinstance(value, fx.Node) and value.target is operator.getitem else value


def _settled(node: fx.Node) -> bool:
    """Whether nothing can be in flight behind `node`, as it was waited for or computed.

    Anything else may be: inputs may have been launched before the graph, and custom ops may launch.
    """
    return is_wait(node) or op_of(node)[0] in ("aten", "prims")


def _one_wait_each(graph: fx.Graph) -> int:
    changed = 0
    for node in list(graph.nodes):
        if not is_wait(node):
            continue
        source = node.args[0]
        while source.target in _VIEWS:
            source = source.args[0]
        # The wait of a viewed launch is added below, before the view.
        launch = _launch_of(source)
        if _settled(launch) or (source is not node.args[0] and is_asynchronous(launch)):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
            changed += 1
    for start in list(graph.nodes):
        if is_asynchronous(start):
            changed += sum(_wait_once(graph, output) for output in outputs_of(start))
    first_wait: dict[fx.Node, fx.Node] = {}  # of an input, which may be read without waiting, too
    for node in list(graph.nodes):
        if is_wait(node) and node.args[0].op == "placeholder":
            first = first_wait.setdefault(node.args[0], node)
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
                changed += 1
    return changed


def _wait_once(graph: fx.Graph, output: fx.Node) -> int:
    """Makes all readers of `output` read it through one wait, directly after it unless it had one wait."""
    users = [user for user in output.users if user.target is not done]  # that it was launched is all `done` needs
    if not users or (len(users) == 1 and is_wait(users[0])):
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


def _drop_unread(graph: fx.Graph) -> int:
    """Drops collectives whose results are not read; ranks share the graph, so all drop the same ones.

    torch keeps waits alive as side effects. Of a functional launch a wait's only effect is its result; of one that
    works in place it is what readers of the mutated tensor rely on, so that stays.
    """
    changed = 0
    for node in reversed(list(graph.nodes)):
        of_launch = is_wait(node) or node.target is operator.getitem
        launch = _launch_of(node.args[0]) if of_launch else node
        if not node.users and isinstance(launch, fx.Node) and is_asynchronous(launch):
            graph.erase_node(node)
            changed += 1
    return changed
