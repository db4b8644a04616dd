"""Changes in place that torch traces wrongly, or refuses to trace: graphs that have one run eagerly.

Functionalization replaces `x.unfold(...).add_(1)` by a function that returns a new `x`. What `unfold` leaves out,
because its step is longer than its size or the last part would not be whole, is 0 there instead of unchanged; where
parts overlap, it refuses the change. It also refuses changes through `as_strided` of what is itself a view.

Dynamo also treats a 0-dim float64 CPU tensor as a Python number. If AOTAutograd makes it capture such a graph once
more, a change of the tensor is not captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from overlapc.fx.captured.in_place import changed_by, name_of
from overlapc.fx.captured.wrapped import memory_of
from overlapc.fx.source import user_line

_HINTS = {
    "unfold": "change a slice, or x.as_strided(...), in place of x.unfold(...)",
    "as_strided of a view": "call as_strided on the whole tensor",
}


def why_eagerly(gm: fx.GraphModule) -> tuple[str, str] | None:
    """Return why a graph captured by Dynamo must run eagerly, and a hint; None if it has no such change."""
    if any(_is_changed_number(node.meta.get("example_value")) for node in gm.graph.find_nodes(op="placeholder")):
        reason = "it modifies an input that is a 0-dim float64 tensor, and torch loses this change"
        return reason, "pass a 1-element tensor, x.view(1)"
    node, view = next(_changes_through_views(gm), (None, ""))
    if node is None:
        return None
    reason, where = f"it modifies memory through {view}, which torch cannot trace", user_line(node)
    return (f"{reason} ({where})" if where else reason), _HINTS[view]


def _is_changed_number(example: Any) -> bool:
    """Whether an input is a tensor that Dynamo also treats as a number, and that was changed during capture."""
    if not isinstance(example, Tensor) or example.dtype is not torch.float64:
        return False
    return example.ndim == 0 and example.device.type == "cpu" and example._version > 0


def _changes_through_views(gm: fx.GraphModule) -> Iterator[tuple[fx.Node, str]]:
    """Yield changes through views that functionalization cannot write to, and the name of the view in `_HINTS`."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        views: set[fx.Node] = set()
        unwritable: dict[fx.Node, str] = {}  # views, and views of them
        for node in module.graph.nodes:
            yield from ((node, unwritable[each]) for each in changed_by(node) if each in unwritable)
            name, read = name_of(node), node.args[0] if node.args else None
            if not isinstance(read, fx.Node) or memory_of(node) != memory_of(read):
                continue
            if name == "as_strided" and read in views:
                unwritable[node] = "as_strided of a view"
            elif read in unwritable:
                unwritable[node] = unwritable[read]
            elif name == "unfold":  # the method; the function of that name copies
                unwritable[node] = "unfold"
            # `contiguous` and changes in place may return the tensor itself, which is no view.
            if read in views or node.meta.get("example_value") is not read.meta.get("example_value"):
                views.add(node)
