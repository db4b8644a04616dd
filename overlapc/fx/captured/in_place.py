"""What a node of a graph that Dynamo captured changes in place."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Iterator
from functools import cache

import torch
from torch import fx

from overlapc.fx.captured.wrapped import memory_of

_OPERATORS = {operator.setitem}.union(
    getattr(operator, f"i{name}")
    for name in "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
)
_METHODS = {f"__{each.__name__}__" for each in _OPERATORS}
# Leave the values as they are; Python's operators have names with `_` where `and` is a keyword.
_NO_CHANGE = {"requires_grad_", "detach_", "share_memory_", "and_", "or_", "not_", "is_"}


def name_of(node: fx.Node) -> str:
    """Return the name of the called method or function: `add_` of `x.add_` and of `torch.ops.aten.add_.Tensor`."""
    if isinstance(node.target, str):
        return node.target
    return str(getattr(getattr(node.target, "overloadpacket", node.target), "__name__", ""))


def changed_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values that `node` changes, recognized by the names of in-place operations and of arguments."""
    name = name_of(node)
    by_name = name.endswith("_") and not name.endswith("__") and name not in _NO_CHANGE
    if by_name or name in _METHODS or node.target in _OPERATORS or _is_inplace(node):
        yield from _nodes(node.args[0] if node.args else node.kwargs.get("input", node.kwargs.get("self")))
    yield from _nodes(node.kwargs.get("out"))


def may_be_changed_by(node: fx.Node) -> Iterable[fx.Node]:
    """Return the values that `node` may change: any of its inputs, unless its name tells which (`names_changes`)."""
    if node.op not in ("call_function", "call_method", "call_module"):
        return ()
    return changed_by(node) if names_changes(node) else node.all_input_nodes


def names_changes(node: fx.Node) -> bool:
    """Whether the name of a call tells what it changes: that of a tensor's method, torch's or Python's function."""
    home = getattr(node.target, "__module__", None) or "torch"
    ours = isinstance(node.target, torch._ops.OpOverload | torch._ops.OpOverloadPacket | torch._ops.HigherOrderOperator)
    if node.op == "call_function":
        return not ours and home.split(".")[0] in ("torch", "_operator", "math", "builtins")
    return node.op == "call_method"


class Writes:
    """The writes of a graph, recorded by a walk in graph order."""

    def __init__(self) -> None:
        self._places: dict[fx.Node, int] = {}
        self._last: dict[object, int] = {}  # memory -> place of the node that may have written to it last
        self._memory = cache(memory_of)

    def visit(self, node: fx.Node) -> None:
        """Record the next node."""
        place = self._places[node] = len(self._places)
        for changed in may_be_changed_by(node):
            self._last |= dict.fromkeys(self._memory(changed), place)

    def unchanged(self, node: fx.Node, since: fx.Node) -> bool:
        """Whether nothing visited after `since` may have written into the memory of `node`."""
        return all(self._last.get(memory, -1) <= self._places[since] for memory in self._memory(node))


def _nodes(given: object) -> Iterator[fx.Node]:
    """Yield `given`, or its elements, that are nodes."""
    yield from (each for each in (given if isinstance(given, list | tuple) else [given]) if isinstance(each, fx.Node))


def _is_inplace(node: fx.Node) -> bool:
    """Whether a function of `torch.nn.functional` is called with `inplace=True`, by position or by name."""
    if not inspect.isfunction(node.target) or node.target.__module__ != "torch.nn.functional":
        return False
    return bool(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments.get("inplace"))
