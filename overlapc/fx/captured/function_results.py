"""Gradients of an `autograd.Function` whose forward changes its result in place, as straight-through estimators do.

torch 2.11 returns intermediate values of such a forward as further results. Those that changed in place are the same
tensor as the result, and autograd then passes the gradient to the last of them: the function's own backward gets zeros.
Inductor and eager backends of torch.compile have the same wrong gradients. Unread results get memory of their own here.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx


def separate_results(gm: fx.GraphModule) -> None:
    """Copy the results of autograd functions that nothing in Dynamo's graph `gm` reads and that repeat another one."""
    function = torch.ops.higher_order.autograd_function_apply
    for module in gm.modules():
        if isinstance(module, fx.GraphModule):
            for call in module.graph.find_nodes(op="call_function", target=function):
                _separate(getattr(module, call.args[0].target), _read(call))


def _read(call: fx.Node) -> set[Any]:
    """Return which results of a call are read."""
    return {user.args[1] for user in call.users if user.target is operator.getitem and user.users}


def _separate(forward: fx.GraphModule, read: set[Any]) -> None:
    (output,) = forward.graph.find_nodes(op="output")
    results, saved = output.args[0]
    if not isinstance(results, tuple | list):
        return
    kept = list(results)
    known: set[int] = set()
    for at, result in enumerate(results):
        if not isinstance(result, fx.Node):
            continue
        tensor = id(result.meta.get("example_value"))
        if tensor in known and at not in read:
            with forward.graph.inserting_before(output):
                kept[at] = forward.graph.call_method("clone", (result,))
                kept[at].meta = {name: value for name, value in result.meta.items() if name != "example_value"}
        known.add(tensor)
    if kept != list(results):
        output.args = ((tuple(kept), saved),)
        forward.recompile()
