"""Library calls of a graph as separate calls on synthetic arguments of the same layouts, for measuring."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import sympy
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from overlapc.estimators.measured import Call
from overlapc.ir.ops import Extern, Layout, LoweredGraph, View, named_in, tree_leaves, tree_map, views_in
from overlapc.lowering.table import LIBRARY_CALLS
from overlapc.schedule.model import Node


def calls_of(graph: LoweredGraph) -> Callable[[Node], Call | None]:
    """Return a function from a schedule node of `graph` to its library call; it returns None for unmeasured nodes."""

    def call_of(node: Node) -> Call | None:
        op = node.payload
        if not isinstance(op, Extern) or op.target not in LIBRARY_CALLS:
            return None  # only library calls: they take most of a step, and their time does not depend on values
        tensors = views_in(op.arguments)
        if not tensors or len(tensors) < len(named_in(op.arguments)):
            return None
        args, kwargs = _at_hints(op.arguments, graph)
        key = f"{op.target}({', '.join(_shown(leaf) for leaf in tree_leaves((args, kwargs)))})"

        def make() -> Callable[[], object]:
            with unset_fake_temporarily():
                given, named = tree_map(_synthetic_argument, (args, kwargs))
            return lambda: _called(op.target, given, named)

        return Call(key, tensors[0].layout.device, make)

    return call_of


def _called(target: Any, args: Any, kwargs: Any) -> object:
    with unset_fake_temporarily(), torch.no_grad():
        return target(*args, **kwargs)


def _at_hints(tree: Any, graph: LoweredGraph) -> Any:
    """Return `tree` with the traced value of every symbolic size, and a Layout in place of every tensor."""

    def leaf(value: Any) -> Any:
        if isinstance(value, View):
            layout = value.layout
            size, stride, (offset,) = (
                tuple(sympy.Integer(graph.hint(number)) for number in numbers)
                for numbers in (layout.size, layout.stride, (layout.offset,))
            )
            return Layout(layout.device, layout.dtype, size, stride, offset)
        return graph.hint(value) if isinstance(value, sympy.Expr) else value

    return tree_map(leaf, tree)


def _shown(leaf: Any) -> str:
    if not isinstance(leaf, Layout):
        return str(leaf)
    dtype = str(leaf.dtype).removeprefix("torch.")
    return f"{dtype}[{' '.join(map(str, leaf.size))}]({' '.join(map(str, leaf.stride))})"


def _synthetic_argument(leaf: Any) -> Any:
    """Return a tensor of layout `leaf`: random floats, from a generator of its own, or zeros for other dtypes."""
    if not isinstance(leaf, Layout):
        return leaf
    memory: Tensor = torch.zeros(int(leaf.storage_numel()), dtype=leaf.dtype, device=leaf.device)
    if leaf.dtype.is_floating_point:
        memory.normal_(generator=torch.Generator(leaf.device).manual_seed(0))
    size, stride = (tuple(map(int, numbers)) for numbers in (leaf.size, leaf.stride))
    return memory.as_strided(size, stride, int(leaf.offset))
