"""Add nodes to a graph with everything later stages read from them: fake values, labels, source lines."""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

_CARRIED = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "custom", "seq_nr")


def described_like(node: fx.Node) -> dict[str, Any]:
    """Meta data of `node` that says where it comes from, for a node made in its place."""
    return {key: node.meta[key] for key in _CARRIED if key in node.meta}


class Writer:
    """Appends calls before `anchor`, described like `like`; `custom` is what `fx.labels` reads."""

    def __init__(self, anchor: fx.Node, like: fx.Node, custom: dict[str, Any] | None = None) -> None:
        self.anchor = anchor
        self.meta = described_like(like)
        if custom is not None:
            self.meta["custom"] = {**self.meta.get("custom", {}), **custom}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A node that calls `target`, with the fake value that it has for these arguments."""
        with self.anchor.graph.inserting_before(self.anchor):
            node = self.anchor.graph.call_function(target, args, kwargs)
        node.meta = dict(self.meta)
        values = map_arg((args, kwargs), lambda arg: arg.meta["val"])
        with _mode_of(values):
            node.meta["val"] = target(*values[0], **values[1])
        return node


def _mode_of(values: Any) -> FakeTensorMode:
    return next(leaf.fake_mode for leaf in pytree.tree_leaves(values) if isinstance(leaf, FakeTensor))


def argument(node: fx.Node, at: int | str) -> Any:
    """A positional or named argument of a call, or None; FX's own types say too little to be of use."""
    if isinstance(at, str):
        return node.kwargs.get(at)
    return node.args[at] if at < len(node.args) else None
