"""Values that backward recomputes although torch's min-cut would save them.

A float32 value that element-wise ops compute from low-precision tensors and small ones (a row's maximum, a sum) is
twice as large as such a tensor: saving it moves more bytes than recomputing it. torch's min-cut also considers the
distance between uses, and saves the softmax of `scores.float()` rather than the scores.

    wide = x.float(); top = amax(wide); total = sum(exp(wide - top)); y = exp(wide - top) / total
    saved: x, top and total; not y

In a chain of gated residuals, whose terms backward reads for the gradients of the gates, every other sum is recomputed:
this costs no extra read, because backward's kernel reads the term anyway. torch's min-cut saves each sum of a sum and a
product, because the former sum is "used far apart"; in a block that is compiled by itself, whose first sum is an input,
it does not save it.

    x1 = x0 + gate0 * (a @ v); x2 = x1 + gate1 * (b @ w)      saved: x0, x2 and both products; not x1
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

from overlapc.fx.versions.graphs import is_tangent

aten = torch.ops.aten

_SMALL = 16  # the size of a root that is smaller than the value by this factor is ignored
_MOST_ROOTS = 6
_VIEWS = frozenset(
    (
        aten.view.default,
        aten.unsqueeze.default,
        aten.expand.default,
        aten.squeeze.dims,
        aten.alias.default,
        aten.permute.default,
    )
)
_COPIES = frozenset((aten._to_copy.default, aten.clone.default))


def recompute_expansions(graph: fx.Graph, backward: Collection[fx.Node]) -> int:
    """Mark values that are larger than what they are computed from as never saved; return their number.

    Policies of checkpoints stay. backward: nodes that depend on tangents.
    """
    roots: dict[fx.Node, frozenset[fx.Node] | None] = {}  # None: not made element by element
    marked = 0
    for node in graph.nodes:
        if node in backward:
            continue
        roots[node] = _roots(node, roots)
        if "recompute" not in node.meta and _expands(node, roots[node]):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            marked += 1
    return marked


def recompute_sums(graph: fx.Graph, backward: Collection[fx.Node]) -> int:
    """Mark every other sum of a chain of gated residuals in a joint graph as never saved; return their number.

    backward: nodes that depend on tangents.
    """
    read = _read_by_backward(graph, backward)
    marked = 0
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor, sort=True):
        size = _size(node)
        kept = "recompute" in node.meta or any(user.op == "output" for user in node.users)
        if not size or node not in read or kept or node.kwargs:
            continue
        for base, term in (node.args, node.args[::-1]):
            if not isinstance(base, fx.Node) or not isinstance(term, fx.Node):
                continue
            saved = base in read and "recompute" not in base.meta and _size(base) == size
            if saved and _is_product_of_saved(term, size, backward):
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
                marked += 1
                break
    return marked


def _read_by_backward(graph: fx.Graph, backward: Collection[fx.Node]) -> set[fx.Node]:
    """Return the nodes of forward that backward reads, and those from which it can compute them element by element."""
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in backward and any(
            user in backward or (user in read and _is_elementwise(user)) for user in node.users
        ):
            read.add(node)
    return read


def _is_product_of_saved(term: fx.Node, size: int, backward: Collection[fx.Node]) -> bool:
    """Whether `term` is the product of small tensors and one tensor that is saved for backward in any case.

    The latter is the result of an op that is never recomputed, and backward reads it. size: bytes of `term`.
    """
    factors = [operand for operand in term.all_input_nodes if _SMALL * (_size(operand) or size) > size]
    if term.target is not aten.mul.Tensor or len(factors) != 1:
        return False
    factor = factors[0]
    saved = any(user in backward for user in factor.users)
    while factor.target in _VIEWS:
        factor = factor.all_input_nodes[0]
        saved = saved or any(user in backward for user in factor.users)
    return saved and factor.op == "call_function" and not _is_elementwise(factor) and "recompute" not in factor.meta


def backward_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on tangents."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or any(operand in backward for operand in node.all_input_nodes):
            backward.add(node)
    return backward


def _roots(node: fx.Node, roots: Mapping[fx.Node, frozenset[fx.Node] | None]) -> frozenset[fx.Node] | None:
    """Return the tensors from which `node` is computed element by element; None if it is not, or from too many."""
    if not _is_elementwise(node):
        return None
    found: frozenset[fx.Node] = frozenset()
    for operand in node.all_input_nodes:
        found |= roots.get(operand) or frozenset((operand,))
    return found if len(found) <= _MOST_ROOTS else None


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result is computed from one element of each operand; False for random ops."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target not in _VIEWS and target not in _COPIES and torch.Tag.pointwise not in target.tags:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


def _expands(node: fx.Node, roots: frozenset[fx.Node] | None) -> bool:
    """Whether `node` is a float32 value whose roots together have at most 3/4 of its bytes."""
    value = node.meta.get("val")
    if not roots or node.target in _VIEWS or not isinstance(value, Tensor) or value.dtype is not torch.float32:
        return False
    size = _bytes(value)
    if size is None:
        return False
    total = 0
    for root in roots:
        root_size = _size(root) if isinstance(root.meta.get("val"), Tensor) else 0
        if root_size is None:
            return False
        total += root_size if _SMALL * root_size > size else 0
    return 0 < total * 4 <= size * 3


def _size(node: fx.Node) -> int | None:
    """Return the bytes of a node's value; None if it is not a tensor, or has a symbolic size."""
    value = node.meta.get("val")
    return _bytes(value) if isinstance(value, Tensor) else None


def _bytes(value: Tensor) -> int | None:
    """Return the bytes of a tensor; None if it has a symbolic size."""
    count = value.numel()
    return count * value.element_size() if isinstance(count, int) else None
