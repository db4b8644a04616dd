"""Random ops inside a checkpoint.

torch's partitioner wraps every op that may be random, so that backward can repeat it with the same generator state:
`run_and_save_rng_state(bernoulli, p)` in forward, `run_with_rng_state(state, bernoulli, p)` in backward. The wrapped
calls have no fake values; `describe` adds them. Attention without dropout draws no random numbers, although its op is
tagged as random: `unwrap_attention` restores the plain calls, and no state is saved. torch's partitioner appends the
states to what forward saves, and `put_states_before_objects` moves them to the other tensors.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from overlapc.fx.arguments import declared_arguments
from overlapc.fx.node_writer import NodeWriter, fake_result
from overlapc.fx.versions.graphs import is_object


def unwrap_attention(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Unwrap attention without dropout in both graphs, in place."""
    if not _unwrap_forward(forward):
        return
    for node in list(backward.graph.nodes):
        if node.target is run_with_rng_state and draws_nothing(node.args[1], node.args[2:], node.kwargs):
            node.replace_all_uses_with(NodeWriter(node, node).call(*node.args[1:], **node.kwargs))
            state = node.args[0]
            assert isinstance(state, fx.Node), f"{node} has its state from {state}"
            assert state.op == "placeholder", f"{node} has its state from {state}"
            backward.graph.erase_node(node)
            backward.graph.erase_node(state)
    forward.recompile()
    backward.recompile()


def put_states_before_objects(forward: fx.GraphModule, backward: fx.GraphModule, forward_outputs: int) -> None:
    """Move saved objects, such as the DeviceMesh of a DTensor, behind the generator states that forward saves.

    AOTAutograd expects forward to save tensors first, then objects, then sizes. torch's partitioner puts the states,
    which are tensors, before the sizes, but behind the objects (torch 2.13).
    """
    output = forward.graph.output_node()
    results: list[fx.Node] = list(output.args[0])  # type: ignore[arg-type]
    saved = results[forward_outputs:]
    objects = [node for node in saved if is_object(node)]
    states = [at for at, node in enumerate(saved) if _is_state(node)]
    if not objects or not states:
        return
    tensors = [node for node in saved[: states[-1] + 1] if node not in objects]
    rest = [node for node in saved[states[-1] + 1 :] if node not in objects]
    output.args = ((*results[:forward_outputs], *tensors, *objects, *rest),)
    arguments = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    taken = {node.args[0] for node in backward.graph.nodes if node.target is run_with_rng_state}
    last_state = [node for node in arguments.values() if node in taken][-1]
    for node in reversed(objects):
        last_state.append(arguments[node.name])
    forward.recompile()
    backward.recompile()


def _is_state(node: fx.Node) -> bool:
    source = node.args[0] if node.target is operator.getitem else None
    return isinstance(source, fx.Node) and source.target is run_and_save_rng_state and bool(node.args[1] == 0)


def describe(gm: fx.GraphModule) -> None:
    """Add the missing fake values of wrapped ops to their metadata."""
    for node in gm.graph.nodes:
        if node.target in (run_and_save_rng_state, run_with_rng_state) and "val" not in node.meta:
            node.meta["val"] = fake_result(node)


def _unwrap_forward(forward: fx.GraphModule) -> bool:
    """Unwrap attention without dropout in forward, which then saves no state for it; return whether there was any."""
    found = False
    output = forward.graph.output_node()
    for node in list(forward.graph.nodes):
        if node.target is not run_and_save_rng_state or not draws_nothing(node.args[0], node.args[1:], node.kwargs):
            continue
        found = True
        call = NodeWriter(node, node).call(*node.args, **node.kwargs)
        for user in list(node.users):
            assert user.target is operator.getitem, f"{user} takes the state and the result of {node} together"
            if user.args[1] == 0:
                output.args = (tuple(value for value in output.args[0] if value is not user),)  # type: ignore[union-attr]
            else:
                user.replace_all_uses_with(call)
            forward.graph.erase_node(user)
        forward.graph.erase_node(node)
    return found


def draws_nothing(target: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call is attention with a dropout of 0."""
    if not isinstance(target, torch._ops.OpOverload) or "_scaled_dot_product" not in target.name():
        return False
    arguments = declared_arguments(target, args, kwargs)
    return any(declared.name == "dropout_p" and given == 0.0 for declared, given in arguments)
