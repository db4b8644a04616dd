"""Changes in place that torch traces wrongly: graphs that have one run eagerly.

Functionalization replaces `x.unfold(...).add_(1)` by a function that returns a new `x`. What `unfold` leaves out,
because its step is longer than its size or the last part would not be whole, is 0 there instead of unchanged; where
parts overlap, it refuses the change.

Dynamo takes a float64 tensor without dims on the CPU for a Python number, too. If AOTAutograd makes it capture such a
graph once more, a change of the tensor is not captured.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from overlapc.fx.source import user_line


def why_eagerly(gm: fx.GraphModule) -> tuple[str, str] | None:
    """Return why a graph captured by Dynamo must run eagerly, and a hint; None if it has no such change."""
    if any(_is_changed_number(node.meta.get("example_value")) for node in gm.graph.find_nodes(op="placeholder")):
        reason = "it changes an input that is a float64 tensor without dims, and torch loses this change"
        return reason, "pass the tensor with one dim, x.view(1)"
    node = next(_changes_through_unfold(gm), None)
    if node is None:
        return None
    reason, where = "it changes memory through unfold, which torch traces wrongly", user_line(node)
    hint = "change a slice, or x.as_strided(...), in place of x.unfold(...)"
    return (f"{reason} ({where})" if where else reason), hint


def _is_changed_number(example: Any) -> bool:
    """Whether an input is a tensor that Dynamo takes for a number, too, and changed in place while it captured."""
    if not isinstance(example, Tensor) or example.dtype is not torch.float64:
        return False
    return example.ndim == 0 and example.device.type == "cpu" and example._version > 0


def _changes_through_unfold(gm: fx.GraphModule) -> Iterator[fx.Node]:
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        unfolded: set[fx.Node] = set()
        for node in module.graph.nodes:
            if not unfolded.isdisjoint(_changed_by(node)):
                yield node
            read = node.args[0] if node.args else None
            views = isinstance(read, fx.Node) and read in unfolded and _memory(node) == _memory(read)
            if views or _name(node) == "unfold":
                unfolded.add(node)


def _name(node: fx.Node) -> str:
    """The name of a method or function: `add_` of `torch.ops.aten.add_.Tensor`, `x.add_` and `torch.add_`."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    packet = getattr(target, "overloadpacket", target)
    return str(getattr(packet, "__name__", ""))


def _changed_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that a node changes."""
    name, target = _name(node), node.target
    by_operator = name in _OPERATORS and getattr(target, "__module__", "") == "_operator"
    if by_operator or name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or _is_inplace(node):
        yield from (arg for arg in node.args[:1] if isinstance(arg, fx.Node))
    out = node.kwargs.get("out")
    yield from (each for each in (out if isinstance(out, list | tuple) else [out]) if isinstance(each, fx.Node))


_OPERATORS = frozenset(
    "setitem iadd iand ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor".split()
)


def _is_inplace(node: fx.Node) -> bool:
    """Whether a function of `torch.nn.functional` is called with `inplace=True`, by position or by name."""
    if not inspect.isfunction(node.target) or node.target.__module__ != "torch.nn.functional":
        return False
    return bool(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace"))


def _memory(node: fx.Node) -> int | None:
    """The memory of a node's tensor; None if unknown, as within `torch.func` transforms, whose tensors have none."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or torch._C._functorch.is_functorch_wrapped_tensor(value):
        return None
    return int(value.untyped_storage()._cdata)
