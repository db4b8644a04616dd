"""What backward computes again, beyond what torch's min-cut decides.

A float32 value that element-wise operations make out of low-precision tensors and small ones (a row's maximum, a
sum) is as large as two of the former: saving it moves more bytes than computing it again. torch's min-cut weighs
distance too, and saves the softmax of `scores.float()` rather than the scores.

    wide = x.float(); top = amax(wide); total = sum(exp(wide - top)); y = exp(wide - top) / total
    saved: x, top and total; not y

Of a chain of gated residuals, whose terms backward reads for the gradients of the gates, every other sum is computed
again: it costs no read where backward's kernel reads the term anyway. torch's min-cut saves each sum that is added to
behind a product, because the sum before it is "used far apart"; of a block that is compiled by itself, whose first sum
is an input, it does not.

    x1 = x0 + gate0 * (a @ v); x2 = x1 + gate1 * (b @ w)      saved: x0, x2 and both products; not x1
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, fx
from torch.utils.checkpoint import CheckpointPolicy

aten = torch.ops.aten

_SMALL = 16  # a root this many times smaller than the value costs nothing
_MOST_ROOTS = 6
_VIEWS = frozenset(
    (aten.view.default, aten.unsqueeze.default, aten.expand.default, aten.squeeze.dims, aten.alias.default)
)


def recompute_expansions(graph: fx.Graph, backward: Collection[fx.Node]) -> int:
    """Marks such values of a joint graph as never saved; returns their number. Policies of checkpoints stay.

    backward: nodes that depend on tangents.
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
    """Marks every other sum of a chain of gated residuals in a joint graph as never saved; returns their number.

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
    """Nodes of forward that backward reads, or computes what it reads from, element by element."""
    read: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if node not in backward and any(
            user in backward or (user in read and _is_elementwise(user)) for user in node.users
        ):
            read.add(node)
    return read


def _is_product_of_saved(term: fx.Node, size: int, backward: Collection[fx.Node]) -> bool:
    """Whether `term` is a tensor that backward reads in any case, multiplied by small ones.

    Such a tensor is the result of an operation that is never repeated, with a reader in backward. size: of `term`.
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
    """The nodes that depend on tangents."""
    backward: set[fx.Node] = set()
    for node in graph.nodes:
        tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if tangent or any(operand in backward for operand in node.all_input_nodes):
            backward.add(node)
    return backward


def _roots(node: fx.Node, roots: Mapping[fx.Node, frozenset[fx.Node] | None]) -> frozenset[fx.Node] | None:
    """The tensors from which `node` is computed element by element; None if it is not, or from too many."""
    if not _is_elementwise(node):
        return None
    found: frozenset[fx.Node] = frozenset()
    for operand in node.all_input_nodes:
        found |= roots.get(operand) or frozenset((operand,))
    return found if len(found) <= _MOST_ROOTS else None


def _is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the result is computed from one of each operand; random operations are not."""
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
        return False
    if target not in _VIEWS and torch.Tag.pointwise not in target.tags and target is not aten._to_copy.default:
        return False
    return torch.Tag.nondeterministic_seeded not in target.tags


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
        root_size = _size(root) if isinstance(root.meta.get("val"), Tensor) else 0
        if root_size is None:
            return False
        total += root_size if _SMALL * root_size > size else 0
    return 0 < total * 4 <= size * 3


def _size(node: fx.Node) -> int | None:
    """Bytes of what a node gives; None where that is no tensor, or a size is a symbol."""
    value = node.meta.get("val")
    return _bytes(value) if isinstance(value, Tensor) else None


def _bytes(value: Tensor) -> int | None:
    """Bytes of a value; None where a size is a symbol."""
    count = value.numel()
    return count * value.element_size() if isinstance(count, int) else None
