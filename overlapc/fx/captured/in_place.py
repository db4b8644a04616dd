"""What a node of a graph that Dynamo captured changes in place."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterator

import torch
from torch import Tensor, fx

_OPERATORS = {operator.setitem}.union(
    getattr(operator, f"i{name}")
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
)
_NO_CHANGE = {"requires_grad_", "detach_", "share_memory_"}  # leave the values as they are


def name_of(node: fx.Node) -> str:
    """Return the name of the called method or function: `add_` of `x.add_` and of `torch.ops.aten.add_.Tensor`."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(getattr(node.target, "overloadpacket", node.target), "__name__", ""))


def changed_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values that `node` changes, recognized by the names of in-place operations and of arguments."""
    name = name_of(node)
    by_name = name.endswith("_") and not name.endswith("__") and name not in _NO_CHANGE
    if by_name or name == "__setitem__" or node.target in _OPERATORS or _is_inplace(node):
        yield from (each for each in node.args[:1] if isinstance(each, fx.Node))
    out = node.kwargs.get("out")
    yield from (each for each in (out if isinstance(out, list | tuple) else [out]) if isinstance(each, fx.Node))


def _is_inplace(node: fx.Node) -> bool:
    """Whether a function of `torch.nn.functional` is called with `inplace=True`, by position or by name."""
    if not inspect.isfunction(node.target) or node.target.__module__ != "torch.nn.functional":
        return False
    return bool(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace"))


def memory_of(node: fx.Node) -> int | None:
    """Return the memory of a node's tensor; None if unknown, as of the tensors within `torch.func` transforms."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return None
    return int(value.untyped_storage()._cdata)
