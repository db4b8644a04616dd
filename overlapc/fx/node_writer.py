"""Adds nodes to a graph with the metadata that later stages read: fake values, labels, source lines."""

from __future__ import annotations

import itertools
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

_CARRIED = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "custom", "seq_nr", "partitioner_tag")


def described_like(node: fx.Node) -> dict[str, Any]:
    """Return the metadata about the origin of `node`, for a node that replaces it."""
    return {key: node.meta[key] for key in _CARRIED if key in node.meta}


class NodeWriter:
    """Inserts calls before `anchor` with the metadata of `like`; `custom` holds the entries that `fx.labels` reads."""

    def __init__(self, anchor: fx.Node, like: fx.Node, custom: dict[str, Any] | None = None) -> None:
        self.anchor = anchor
        self.meta = described_like(like)
        if custom is not None:
            self.meta["custom"] = {**self.meta.get("custom", {}), **custom}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a node that calls `target`, with its fake result as metadata, and return it."""
        with self.anchor.graph.inserting_before(self.anchor):
            node = self.anchor.graph.call_function(target, args, kwargs)
        node.meta = dict(self.meta)
        node.meta["val"] = fake_result(node)
        return node


def fake_result(node: fx.Node) -> Any:
    """Return the result of a call on the fake values of its arguments; the graph must have at least one fake tensor."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    values = itertools.chain((args, kwargs), (other.meta.get("val") for other in node.graph.nodes))
    leaves = itertools.chain.from_iterable(map(pytree.tree_leaves, values))
    mode = next(leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]
