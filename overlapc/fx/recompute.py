"""What backward computes again, beyond what torch's min-cut decides.

A float32 value that element-wise operations make out of low-precision tensors and small ones (a row's maximum, a
sum) is as large as two of the former: saving it moves more bytes than computing it again. torch's min-cut weighs
distance too, and saves the softmax of `scores.float()` rather than the scores.

    wide = x.float(); top = amax(wide); total = sum(exp(wide - top)); y = exp(wide - top) / total
    saved: x, top and total; not y
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten

_SMALL = 16  # a root this many times smaller than the value costs nothing
_MOST_ROOTS = 6
_VIEWS = frozenset(
    (aten.view.default, aten.unsqueeze.default, aten.expand.default, aten.squeeze.dims, aten.alias.default)
)


def recompute_expansions(graph: fx.Graph) -> int:
    """Marks such values of a joint graph as never saved; returns their number. Policies of checkpoints stay."""
    roots: dict[fx.Node, frozenset[fx.Node] | None] = {}  # None: not made element by element
    backward = backward_nodes(graph)
    marked = 0
    for node in graph.nodes:
        if node in backward:
            continue
        roots[node] = _roots(node, roots)
        if "recompute" not in node.meta and _expands(node, roots[node]):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            marked += 1
    return marked


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on tangents."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or any(operand in backward for operand in node.all_input_nodes):
            backward.add(node)
    return backward


def _roots(node: fx.Node, roots: Mapping[fx.Node, frozenset[fx.Node] | None]) -> frozenset[fx.Node] | None:
    """The tensors from which `node` is computed element by element; None if it is not, or from too many."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return None
    if target not in _VIEWS and torch.Tag.pointwise not in target.tags and target is not aten._to_copy.default:
        return None
    if torch.Tag.nondeterministic_seeded in target.tags:
        return None
    found: frozenset[fx.Node] = frozenset()
    for operand in node.all_input_nodes:
        found |= roots.get(operand) or frozenset((operand,))
    return found if len(found) <= _MOST_ROOTS else None


def _expands(node: fx.Node, roots: frozenset[fx.Node] | None) -> bool:
    """Whether a float32 value is larger than all the tensors that it is computed from."""
    value = node.meta.get("val")
    if not roots or node.target in _VIEWS or not isinstance(value, Tensor) or value.dtype is not torch.float32:
        return False
    size = _bytes(value)
    if size is None:
        return False
    total = 0
    for root in roots:
        found = root.meta.get("val")
        root_size = _bytes(found) if isinstance(found, Tensor) else 0
        if root_size is None:
            return False
        total += root_size if _SMALL * root_size > size else 0
    return 0 < total * 4 <= size * 3


def _bytes(value: Tensor) -> int | None:
    """Bytes of a value; None where a size is a symbol."""
    count = value.numel()
    return count * value.element_size() if isinstance(count, int) else None
