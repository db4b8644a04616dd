"""Operators that draw random numbers under a checkpoint.

torch's partitioner wraps every operator that may be random, so that backward can repeat it with the same state:
`run_and_save_rng_state(bernoulli, p)` in forward, `run_with_rng_state(state, bernoulli, p)` in backward. It leaves out
what these give, which `describe` adds. Attention without dropout draws no random numbers, whatever its operator's tags
say: `unwrap_attention` makes both the plain call again, and no state is saved.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten


def unwrap_attention(forward: fx.GraphModule, backward: fx.GraphModule) -> None:
    """Take the wrapping off attention without dropout, in both graphs; in place."""
    if not _unwrap_saving(forward):
        return
    for node in list(backward.graph.nodes):
        if node.target is run_with_rng_state and draws_nothing(node.args[1], node.args[2:], node.kwargs):
            node.replace_all_uses_with(_plain(node, node.args[1], node.args[2:]))
            state = node.args[0]
            assert isinstance(state, fx.Node), f"{node} has its state from {state}"
            assert state.op == "placeholder", f"{node} has its state from {state}"
            backward.graph.erase_node(node)
            backward.graph.erase_node(state)
    forward.recompile()
    backward.recompile()


def describe(gm: fx.GraphModule) -> None:
    """Give wrapped operators the fake tensors that every node of a graph carries."""
    for node in gm.graph.nodes:
        if node.target in (run_and_save_rng_state, run_with_rng_state) and "val" not in node.meta:
            node.meta["val"] = _fake_result(node.target, node.args, node.kwargs)


def _unwrap_saving(forward: fx.GraphModule) -> bool:
    """Whether there was any; the states are no longer saved."""
    found = False
    output = forward.graph.output_node()
    for node in list(forward.graph.nodes):
        if node.target is not run_and_save_rng_state or not draws_nothing(node.args[0], node.args[1:], node.kwargs):
            continue
        found = True
        call = _plain(node, node.args[0], node.args[1:])
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
    """Whether this is attention with a dropout of 0."""
    schema = getattr(target, "_schema", None)
    if schema is None or "_scaled_dot_product" not in schema.name:
        return False
    at = next((at for at, argument in enumerate(schema.arguments) if argument.name == "dropout_p"), None)
    if at is None:
        return False
    given = args[at] if at < len(args) else kwargs.get("dropout_p", schema.arguments[at].default_value)
    return given == 0.0


def _plain(node: fx.Node, target: Any, args: Sequence[Any]) -> fx.Node:
    """The call that `node` wraps, before it; with what it gives as fake tensors."""
    with node.graph.inserting_before(node):
        call = node.graph.call_function(target, tuple(args), dict(node.kwargs))
    call.meta = dict(node.meta)
    call.meta["val"] = _fake_result(target, args, node.kwargs)
    return call


def _fake_result(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    given, named = tree_map(
        lambda leaf: leaf.meta["val"] if isinstance(leaf, fx.Node) else leaf, (tuple(args), dict(kwargs))
    )
    with _mode_of(*[leaf for leaf in args if isinstance(leaf, fx.Node)]):
        return target(*given, **named)


def _mode_of(*nodes: fx.Node) -> FakeTensorMode:
    """The mode that the graph's fake tensors belong to."""
    for node in nodes:
        value = node.meta["val"]
        for leaf in value if isinstance(value, tuple | list) else (value,):
            mode = getattr(leaf, "fake_mode", None)
            if isinstance(mode, FakeTensorMode):
                return mode
    raise AssertionError(f"none of {nodes} holds a fake tensor")
