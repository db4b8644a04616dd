"""Products of tensors that autograd knows to be zero (`aten._efficientzerotensor`), such as the gradient of `sign`.

Eager multiplies nothing by such a tensor: the product is zero even if the other factor is infinite or NaN, which an
ordinary multiplication by zeros would make NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, fx

from overlapc.fx.node_writer import NodeWriter

aten = torch.ops.aten
_PRODUCTS = (aten.mul.Tensor, aten.mul.Scalar)
_QUOTIENTS = (aten.div.Tensor, aten.div.Scalar)
_SUMS = (aten.add.Tensor, aten.sub.Tensor)


def keep_products_zero(graph: fx.Graph) -> None:
    """Let ones take the place of what a tensor known to be zero is multiplied with, or divided by.

    Known to be zero are also products, quotients, views, and sums of two of them (torch's `ZeroTensorFallback.cpp`).
    """
    zeros = set(graph.find_nodes(op="call_function", target=aten._efficientzerotensor.default))
    if not zeros:
        return
    for node in list(graph.nodes):
        if _stays_zero(node, zeros):
            zeros.add(node)


def _stays_zero(node: fx.Node, zeros: set[fx.Node]) -> bool:
    """Whether `node` is known to be zero, as some of its arguments are in `zeros`; its other factor becomes one."""
    target, args = node.target, node.args
    if target in _PRODUCTS and not zeros.isdisjoint(args[:2]):
        other = 1 if args[0] in zeros else 0
        return args[other] in zeros or _becomes_one(node, other)
    if target in _QUOTIENTS:
        return args[0] in zeros and args[1] not in zeros and _becomes_one(node, 1)
    if target in _SUMS:
        return zeros.issuperset(args[:2])
    return getattr(target, "is_view", False) and bool(args) and args[0] in zeros


def _becomes_one(node: fx.Node, at: int) -> bool:
    """Replace argument `at` by ones of its shape and dtype; return False if it is neither a tensor nor a number."""
    argument = node.args[at]
    if isinstance(argument, fx.Node):
        if argument.target is aten.ones_like.default:  # by an earlier call, of the joint graph
            return True
        if not isinstance(argument.meta.get("val"), Tensor):
            return False
        node.update_arg(at, NodeWriter(node, node).call(aten.ones_like.default, argument))
    elif isinstance(argument, int | float) and (not math.isfinite(argument) or argument == 0):
        node.update_arg(at, type(argument)(1))
    return True
