"""Finds coarse nodes: float32 nodes whose values reach only results that are rounded to 16 bits.

    wide = x.float(); y = (exp(wide - top) / total).to(bfloat16)        exp, total and the quotient are coarse

A coarse node may be off by a few units in the last place (lowering/precision.py). This is decided on the joint graph
and noted on each node, so that a node which both forward and backward compute has the same value in both.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_LOW = frozenset((torch.float16, torch.bfloat16))
_NOTE = "overlapc_coarse"

# Ops whose result has an error about as large as that of their operands (see lowering/precision.py).
_PASSES_ON = frozenset(
    getattr(aten, name)
    for name in (
        "add sub rsub mul div neg maximum minimum relu abs sigmoid tanh erf where masked_fill _to_copy clone sum mean "
        "amax amin _softmax_backward_data _log_softmax_backward_data view expand unsqueeze squeeze permute slice "
        "select alias cat constant_pad_nd"
    ).split()
) | {torch.ops.prims.convert_element_type}


def note_coarse(graph: fx.Graph) -> None:
    """Note on every float32 node of `graph` whether it is coarse."""
    coarse: set[fx.Node] = set()
    for node in reversed(graph.nodes):  # users before what they read
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or value.dtype is not torch.float32:
            continue
        if node.users and all(_forgives(user, node, coarse) for user in node.users):
            coarse.add(node)
        node.meta[_NOTE] = node in coarse


def note_coarse_once(graph: fx.Graph) -> None:
    """Call `note_coarse`, unless `graph` is a part of a divided step, whose nodes are noted already."""
    if not any(_NOTE in node.meta for node in graph.nodes):
        note_coarse(graph)


def is_coarse(node: fx.Node) -> bool:
    """Whether `note_coarse` found this node coarse; nodes added later count as exact."""
    return bool(node.meta.get(_NOTE, False))


def _forgives(user: fx.Node, node: fx.Node, coarse: set[fx.Node]) -> bool:
    """Whether `user` rounds the value of `node` to 16 bits, or is itself coarse."""
    packet = getattr(user.target, "overloadpacket", None)
    if packet is aten._log_softmax_backward_data and user.args[1] is node:
        return False  # it takes the exponential of this operand
    if packet not in _PASSES_ON:
        return False
    value = user.meta.get("val")
    return user in coarse or (isinstance(value, Tensor) and value.dtype in _LOW)
