"""Changes in place that torch traces wrongly: graphs that have one run eagerly.

Functionalization replaces `x.unfold(...).add_(1)` by a function that returns a new `x`. What `unfold` leaves out,
because its step is longer than its size or the last part would not be whole, is 0 there instead of unchanged; where
parts overlap, it refuses the change.

Dynamo takes a float64 tensor without dims on the CPU for a Python number, too. If AOTAutograd makes it capture such a
graph once more, a change of the tensor is not captured.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from overlapc.fx.in_place import changed_by, memory_of, name_of
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
            if not unfolded.isdisjoint(changed_by(node)):
                yield node
            read = node.args[0] if node.args else None
            views = isinstance(read, fx.Node) and read in unfolded and memory_of(node) == memory_of(read)
            if views or name_of(node) == "unfold":
                unfolded.add(node)
