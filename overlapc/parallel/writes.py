"""Refuse to compile a forward that changes gathered parameters: the next gather would not contain the change."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx

from overlapc.errors import CompileError
from overlapc.fx.source import user_line
from overlapc.parallel.gather import param_of, unshard

_OPERATORS = {operator.setitem}.union(
    getattr(operator, f"i{name}") for name in "add sub mul truediv floordiv mod pow matmul and or xor".split()
)
_NO_CHANGE = {"requires_grad_", "detach_", "share_memory_"}  # leave the values as they are


def refuse_writes(graph: fx.Graph) -> None:
    """Raise CompileError for the first node of Dynamo's `graph` that writes into a gathered parameter or its view."""
    gathers = graph.find_nodes(op="call_function", target=unshard)
    keys = {_memory(node): str(node.args[1]) for node in gathers}
    for node in graph.nodes if keys else ():
        for changed in _changed(node):
            memory = _memory(changed)
            if memory is None or memory not in keys:
                continue
            param = param_of(keys[memory])
            name = ".".join(filter(None, (param.group.paths[param.part], param.name)))
            raise CompileError(
                f"{node.name} writes into {name}, which is gathered again for each use\n"
                f"   {user_line(node) or 'unknown line'}\n"
                "The change would be lost.\n"
                "hint: change the sharded parameter between steps, or a copy of it: parameter.clone()"
            )


def _changed(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values that `node` changes in place, recognized by the names of in-place operations."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name not in _NO_CHANGE
    written: list[Any] = [*node.args[:1]] if in_place or node.target in _OPERATORS else []
    written.append(node.kwargs.get("out"))
    yield from (each for each in written if isinstance(each, fx.Node))


def _memory(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return value.untyped_storage()._cdata if isinstance(value, Tensor) else None
