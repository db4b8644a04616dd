"""Adds nodes to a graph with the metadata that later stages read: fake values, labels, source lines."""

from __future__ import annotations

import itertools
from typing import Any

from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from overlapc.fx.versions.tensors import fake_like

_CARRIED = ("stack_trace", "nn_module_stack", "fwd_nn_module_stack", "custom", "seq_nr", "partitioner_tag")


def described_like(node: fx.Node) -> dict[str, Any]:
    """Return the metadata about the origin of `node`, for a node that replaces it."""
    return {key: node.meta[key] for key in _CARRIED if key in node.meta}


class NodeWriter:
    """Inserts calls before `anchor` with the metadata of `like`; `custom` holds the entries that `fx.labels` reads.

    results: of calls made before in the same fake mode, if many calls are alike.
    """

    def __init__(
        self,
        anchor: fx.Node,
        like: fx.Node,
        custom: dict[str, Any] | None = None,
        results: FakeResults | None = None,
    ) -> None:
        self.anchor = anchor
        self.meta = described_like(like)
        self.result_of = fake_result if results is None else results.of
        if custom is not None:
            self.meta["custom"] = {**self.meta.get("custom", {}), **custom}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a node that calls `target`, with its fake result as metadata, and return it."""
        with self.anchor.graph.inserting_before(self.anchor):
            node = self.anchor.graph.call_function(target, args, kwargs)
        node.meta = dict(self.meta)
        node.meta["val"] = self.result_of(node)
        return node


class FakeResults:
    """Results of calls on fake tensors. If a call differs from an earlier one only in the memory of its tensors, its
    result is built from the earlier result, which is faster than calling the op."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, str], tuple[FakeTensor, int | None]] = {}

    def of(self, node: fx.Node) -> Any:
        """Return the result of `node`, all of whose arguments have known sizes; see `fake_result`."""
        given = [arg.meta["val"] for arg in node.all_input_nodes]
        key = (node.target, repr(map_arg((node.args, node.kwargs), _form)))
        if key not in self._known:
            result = fake_result(node)
            memory = result.untyped_storage()._cdata
            shared = [at for at, value in enumerate(given) if value.untyped_storage()._cdata == memory]
            self._known[key] = result, shared[0] if shared else None
            return result
        like, shared_with = self._known[key]
        return fake_like(like, None if shared_with is None else given[shared_with], 0)


def _form(node: fx.Node) -> str:
    """Return the text of a node's tensor without its memory."""
    value = node.meta["val"]
    return f"{value.dtype} {value.device} {tuple(value.shape)} {value.stride()} {value.storage_offset()}"


def fake_result(node: fx.Node) -> Any:
    """Return the result of a call on the fake values of its arguments; the graph must have at least one fake tensor."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda arg: arg.meta["val"])
    values = itertools.chain((args, kwargs), (other.meta.get("val") for other in node.graph.nodes))
    leaves = itertools.chain.from_iterable(map(pytree.tree_leaves, values))
    mode = next(leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))
    with mode:
        return node.target(*args, **kwargs)  # type: ignore[operator]
