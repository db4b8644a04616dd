"""Finds tensors of a Dynamo graph whose elements depend only on position: `arange`, `tril`, comparisons of these.

`Positions` visits the nodes of a graph and represents such a tensor as a function from a symbolic index to the value of
the element there (position_values.py), with rules for torch's functions (position_rules.py). Other tensors are unknown;
nothing is computed.

    i = arange(n)[:, None]; j = arange(n); allowed = j <= i      ->  allowed[x, y]:  x - y >= 0
"""

from __future__ import annotations

import operator
from functools import cache
from typing import Any

import sympy
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from overlapc.fx.captured.in_place import may_be_changed_by, names_changes
from overlapc.fx.captured.wrapped import memory_of
from overlapc.fx.masks.position_rules import RULES, WITHOUT_TENSOR
from overlapc.fx.masks.position_values import Grid, UnknownValue, of_dtype

_UNSEEN = object()  # an argument that is not known to depend only on positions


class Positions:
    """The nodes of one graph whose elements depend only on positions, among those that `visit` was called on."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, Grid] = {}
        self._sharing: dict[object, list[fx.Node]] = {}  # memory -> its known nodes
        self._memory = cache(memory_of)
        self.shape_env: ShapeEnv | None = None  # of the first symbolic size

    def grid(self, node: Any) -> Grid | None:
        """Return the grid of the value of `node`; None if it is unknown."""
        return self._known.get(node)

    def learn(self, node: fx.Node, grid: Grid) -> None:
        """Record the grid of `node`."""
        self._known[node] = grid
        self._sharing.setdefault(self._memory(node), []).append(node)

    def visit(self, node: fx.Node) -> None:
        """Record the value of the next node in graph order, and its in-place changes."""
        value, name, is_known = node.meta.get("example_value"), _name(node), names_changes(node)
        changed = tuple(may_be_changed_by(node))
        if len(changed) == 1 and is_known:
            self._change(node, _WRITING_OPERATORS.get(name, name.removesuffix("_")), changed[0])
        elif changed:
            for each in changed:
                self.forget(each)
        elif isinstance(value, Tensor) and name in RULES and is_known:
            grid = self._grid_of(node, name, value)
            if grid is not None:
                self.learn(node, grid)

    def _grid_of(self, node: fx.Node, name: str, value: Tensor) -> Grid | None:
        try:
            given = [self._argument(each) for each in node.args]
            named = {key: self._argument(each) for key, each in node.kwargs.items()}
            given += [named.pop(key) for key in ("input", "self") if key in named]  # `where`: after the condition
            if node.op == "call_method" and name == "where":  # x.where(condition, y) is torch.where(condition, x, y)
                given[:2] = reversed(given[:2])
            if not given and name not in WITHOUT_TENSOR:
                return None
            size = tuple(map(self.extent, value.shape))
            return Grid(size, of_dtype(RULES[name](given, named, size), value.dtype))
        except UnknownValue:
            return None

    def _change(self, node: fx.Node, name: str, changed: fx.Node) -> None:
        """Record a write into `changed`, which is known afterwards only if all known nodes in its memory are equal."""
        value, grid = changed.meta.get("example_value"), self._known.get(changed)
        names = self._sharing.get(self._memory(changed), [])
        whole = grid is not None and all(self._known[each] is grid for each in names)
        known = whole and isinstance(value, Tensor) and name in RULES
        after = self._grid_of(node, name, value) if known else None  # type: ignore[arg-type]
        self.forget(changed)
        if after is not None:
            for each in (*names, node):
                self.learn(each, after)

    def forget(self, node: fx.Node) -> None:
        """Forget the values of all nodes in the memory of `node`."""
        for each in self._sharing.pop(self._memory(node), ()):
            del self._known[each]

    def extent(self, size: int | torch.SymInt) -> sympy.Expr:
        """Return `size` as an expression."""
        if isinstance(size, torch.SymInt):
            self.shape_env = self.shape_env or size.node.shape_env
            return size.node.expr
        return sympy.Integer(size)

    def _argument(self, given: Any) -> Any:
        """Convert an argument for a rule: grids for tensors, expressions for integers, _UNSEEN for other nodes."""
        if isinstance(given, fx.Node):
            if given in self._known:
                return self._known[given]
            given = given.meta.get("example_value")
            if not isinstance(given, bool | int | torch.SymInt):
                return _UNSEEN
        if isinstance(given, list | tuple):  # which differ as an index
            return (tuple if isinstance(given, tuple) else list)(self._argument(each) for each in given)
        if isinstance(given, slice):
            return slice(*(self._argument(each) for each in (given.start, given.stop, given.step)))
        if isinstance(given, torch.SymInt) or (isinstance(given, int) and not isinstance(given, bool)):
            return self.extent(given)
        return given


# --- names of operations


def _name(node: fx.Node) -> str:
    """Return the name of the called function; `eq` for `a.__eq__(b)`, which torch 2.11 traces."""
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    function = getattr(operator, name, None) if name.startswith("__") else None
    return name if function is None else function.__name__


# In-place operator -> the operator whose result it writes.
_WRITING_OPERATORS = {
    **{f"i{name}": name for name in "add sub mul truediv floordiv mod pow matmul xor lshift rshift".split()},
    "iand": "and_",
    "ior": "or_",
}
