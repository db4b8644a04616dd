"""Values that must not be recomputed, because a node compares them and their bits depend on the kernel they are in.

    total = sum(x); share = x / total; top = amax(share); ...; hit = eq(share, top)          total is saved

The last bit of a sum depends on the order of its terms, and so on the kernel that the sum is fused into; the same holds
for all ops in `_INEXACT`. Element-wise ops, maxima and library calls give the same bits when they are repeated. A
compared sum is saved even in a checkpoint that recomputes everything: it is small compared to what it sums.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten


def _packets(names: str) -> frozenset[object]:
    return frozenset(getattr(aten, name) for name in names.split())


# Sums and products in an order that overlapc chooses, atomics among them.
_INEXACT = _packets(
    "sum mean prod var var_mean std std_mean cumsum cumprod logcumsumexp logsumexp linalg_vector_norm norm index_add "
    "scatter_add scatter_reduce index_put _softmax _log_softmax native_layer_norm native_group_norm"
)
# Ops whose result can change completely with the last bit of an operand: comparisons, rounding, sorting, searching.
_DISCONTINUOUS = _packets(
    "eq ne lt le gt ge isnan isinf sign sgn floor ceil trunc round frac remainder fmod floor_divide heaviside "
    "logical_not logical_and logical_or logical_xor threshold_backward hardtanh_backward argmax argmin sort topk "
    "kthvalue median nanmedian mode cummax cummin searchsorted bucketize nonzero"
)


def save_compared_values(graph: fx.Graph, backward: set[fx.Node]) -> int:
    """Mark these values of a joint graph as saved; return their number. backward: nodes that depend on tangents."""
    sensitive: set[fx.Node] = set()  # nodes whose last bit decides a result
    marked = 0
    for node in reversed(graph.nodes):
        if node.op != "call_function":
            continue
        if not any(_is_discontinuous(user) or user in sensitive for user in node.users):
            continue
        if getattr(node.target, "overloadpacket", None) not in _INEXACT or node in backward or not _is_float(node):
            sensitive.add(node)
            continue
        for saved in _results(node):
            saved.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        marked += 1
    return marked


def _results(node: fx.Node) -> Iterable[fx.Node]:
    """Return the node and the `getitem` nodes that select its results."""
    return (node, *(user for user in node.users if user.target is operator.getitem))


def _is_discontinuous(user: fx.Node) -> bool:
    target = user.target
    packet = getattr(target, "overloadpacket", None)
    if packet in _DISCONTINUOUS:
        return True
    if packet in (aten.max, aten.min):  # along a dim, they also return indices
        return target in (aten.max.dim, aten.min.dim)
    if packet is aten.div and "rounding_mode" in user.kwargs:
        return True
    value = user.meta.get("val")
    converts = packet is aten._to_copy or target is torch.ops.prims.convert_element_type.default
    return converts and isinstance(value, Tensor) and not value.dtype.is_floating_point


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, tuple | list) and value else value
    return isinstance(first, Tensor) and first.dtype.is_floating_point
