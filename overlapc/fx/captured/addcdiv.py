"""`addcdiv` in place of the three calls that Dynamo writes for it.

Dynamo (torch 2.11 to 2.13) captures `torch.addcdiv(x, a, b, value=v)` as `add(x, mul(div(a, b), v))`. Where `a` and `b`
are of low precision and `x` is not, that rounds the quotient, which eager computes with the precision of `x`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node


def restore_addcdiv(gm: GraphModule) -> None:
    """Write `addcdiv` again in Dynamo's graph and the graphs inside it."""
    for module in gm.modules():
        if isinstance(module, GraphModule):
            found = [node for node in module.graph.find_nodes(op="call_function", target=torch.add) if _restored(node)]
            if found:
                module.recompile()


def _restored(add: Node) -> bool:
    """Whether this sum was one of Dynamo's, and is replaced."""
    product = add.prev
    quotient = product.prev
    if product.target is not torch.mul or quotient.target is not torch.div:
        return False
    if any(node.kwargs or len(node.args) != 2 for node in (add, product, quotient)):
        return False
    x, last = add.args
    divided, value = product.args
    trace = quotient.meta.get("stack_trace")
    if not trace or not trace == product.meta.get("stack_trace") == add.meta.get("stack_trace"):
        return False
    line = trace.rstrip("\n ^~").rpartition("\n")[2]
    if "addcdiv" not in line and not line.lstrip().startswith("File "):  # else the source is not known
        return False
    if not all(map(_has_fractions, (x, *quotient.args))):
        return False
    if last is not product or divided is not quotient or isinstance(value, Node) or x in (product, quotient):
        return False
    if len(product.users) != 1 or len(quotient.users) != 1:
        return False
    graph = add.graph
    with graph.inserting_before(add):
        call = graph.call_function(torch.addcdiv, (x, *quotient.args), {"value": value})
    call.meta = dict(add.meta)
    add.replace_all_uses_with(call)
    for node in (add, product, quotient):
        graph.erase_node(node)
    return True


def _has_fractions(value: Any) -> bool:
    """Whether `value` is a node whose tensor has a floating-point or complex dtype, as `addcdiv` needs."""
    tensor = value.meta.get("example_value") if isinstance(value, Node) else None
    return isinstance(tensor, Tensor) and (tensor.dtype.is_floating_point or tensor.dtype.is_complex)
