"""Which float32 nodes of a graph end in a format of 16 bits, however they get there.

    wide = x.float(); y = (exp(wide - top) / total).to(bfloat16)        exp, total and the quotient are coarse

What such a node computes may be off by a few units in the last place (lowering/precision.py). That is decided before
forward and backward part, on the graph of both, and noted on each node: a node that both compute gives both the same.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

aten = torch.ops.aten
_LOW = frozenset((torch.float16, torch.bfloat16))
_NOTE = "overlapc_coarse"

# What hands an error on about as large as it takes it (see lowering/precision.py).
_PASSES_ON = frozenset(
    getattr(aten, name)
    for name in (
        "add sub rsub mul div neg maximum minimum relu abs sigmoid tanh erf where masked_fill _to_copy clone sum mean "
        "amax amin _softmax_backward_data _log_softmax_backward_data view expand unsqueeze squeeze permute slice "
        "select alias cat constant_pad_nd"
    ).split()
) | {torch.ops.prims.convert_element_type}


def note_coarse(graph: fx.Graph) -> None:
    """Notes on every float32 result in `graph` whether it is coarse."""
    coarse: set[fx.Node] = set()
    for node in reversed(graph.nodes):  # users before what they read
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or value.dtype is not torch.float32:
            continue
        if node.users and all(_forgives(user, node, coarse) for user in node.users):
            coarse.add(node)
        node.meta[_NOTE] = node in coarse


def is_noted(graph: fx.Graph) -> bool:
    """Whether `graph` is, or comes from, one that `note_coarse` has seen."""
    return any(_NOTE in node.meta for node in graph.nodes)


def is_coarse(node: fx.Node) -> bool:
    """Whether `note_coarse` marked this node; a node made after it ran counts as exact."""
    return bool(node.meta.get(_NOTE, False))


def _forgives(user: fx.Node, node: fx.Node, coarse: set[fx.Node]) -> bool:
    """Whether `user` rounds what it reads of `node`, or hands it on to those who do."""
    packet = getattr(user.target, "overloadpacket", None)
    if packet is aten._log_softmax_backward_data and user.args[1] is node:
        return False  # it takes the exponential of that
    if packet not in _PASSES_ON:
        return False
    value = user.meta.get("val")
    return user in coarse or (isinstance(value, Tensor) and value.dtype in _LOW)
