"""Graphs that cannot be compiled and run op by op, as they were traced: which node is the reason, and why."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from overlapc.fx.sizes import guessed_size
from overlapc.fx.versions.tensors import size_hint

aten = torch.ops.aten


def reason_to_run_op_by_op(graph: fx.Graph) -> tuple[fx.Node, str] | None:
    """Return the first node that cannot be compiled, and the reason; None if there is none."""
    guessed = guessed_size(graph)
    if guessed is not None:
        why = "gives a size that depends on data and was traced as a constant"
        return guessed, f"{guessed.name} = {guessed.target} {why}"
    for node in graph.find_nodes(op="call_function", target=aten.as_strided.default):
        made = _made_by(node)
        if made.op == "call_function" and _has_hidden_elements(made.meta.get("val")):
            return node, (
                f"{node.name} = as_strided may read memory of {made.name} = {made.target} that holds no elements of its"
                " result: eager copies into it what lies between the elements of the op's input, and before them"
            )
    return None


def _made_by(node: fx.Node) -> fx.Node:
    """Return the node that allocates the memory of which `node` is a view: an input, or a call."""
    while isinstance(node.target, torch._ops.OpOverload) and node.target.is_view and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _has_hidden_elements(value: object) -> bool:
    """Whether the memory of a tensor is larger than its elements, as that of `torch.slice_scatter(x[1:], ...)`."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return False
    elements_bytes = size_hint(value.numel()) * value.element_size()
    return size_hint(value.storage_offset()) > 0 or size_hint(value.untyped_storage().nbytes()) > elements_bytes
