"""Common subexpression elimination on a joint graph.

    a = _to_copy(x, dtype=bfloat16); …; b = _to_copy(x, dtype=bfloat16)  ->  a, read by b's users too

torch's partitioner has such a pass, too, but it imports most of Inductor and takes ten times as long.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from overlapc.fx.comm.claim import CLAIM
from overlapc.fx.comm.communication import WAIT
from overlapc.fx.versions.graphs import binds_sizes

# Each call has a result of its own: memory that is not initialized, or whether the call was the first one.
_NEVER_EQUAL = frozenset({torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, CLAIM})


class _Unknown(Exception):
    """An argument that cannot be compared with another."""


def merge_duplicates(graph: fx.Graph) -> int:
    """Replace each node by an equal earlier one; return the number of replaced nodes.

    Nodes that draw random numbers, write to memory, share memory with a result of the graph (two equal results must be
    two tensors), or call neither a torch op nor a Python operator are not merged. Neither are two equal nodes with a
    write to memory between them.
    """
    leaving = storages_that_leave(graph)
    changes = 0

    def kind(node: fx.Node) -> int | None:
        nonlocal changes
        if _changes_memory(node):
            changes += 1
            return None
        return changes if _is_function(node) and storages_of(node).isdisjoint(leaving) else None

    return merge_equal(graph, kind)


def merge_equal(graph: fx.Graph, kind: Callable[[fx.Node], object]) -> int:
    """Replace each node by an earlier one with the same op, arguments and `kind`; return the number of replaced nodes.

    `kind` is called on every function call, in graph order. Calls for which it returns None are not merged.
    """
    first: dict[Any, fx.Node] = {}
    merged = 0
    for node in list(graph.nodes):
        if node.op != "call_function" or (of := kind(node)) is None:
            continue
        try:
            key = (node.target, of, _key(node.args), _key(node.kwargs))
        except _Unknown:
            continue
        kept = first.setdefault(key, node)
        if kept is not node:
            node.replace_all_uses_with(kept)
            graph.erase_node(node)
            merged += 1
    return merged


def _changes_memory(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return bool(target._schema.is_mutable)
    # Of ops without a schema, only those with "mutation" in the name write after functionalization; Python's
    # operators compute sizes.
    return "mutation" in getattr(target, "__name__", "")


def _is_function(node: fx.Node) -> bool:
    """Whether equal arguments give equal results, and a program cannot tell the two results' memory apart."""
    target = node.target
    if binds_sizes(node):  # each call defines a symbol of its own, which other nodes' sizes contain
        return False
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded not in target.tags and target not in _NEVER_EQUAL
    return getattr(target, "__module__", "") in ("_operator", "math") or target is operator.getitem


def storages_that_leave(graph: fx.Graph) -> set[int]:
    """Return the ids of the storages that the graph's results share."""
    (output,) = graph.find_nodes(op="output")
    leaving = {storage for node in output.all_input_nodes for storage in storages_of(node)}
    for wait in graph.find_nodes(op="call_function", target=WAIT):  # its fake tensor has memory of its own
        if not leaving.isdisjoint(storages_of(wait)):
            leaving |= storages_of(wait.args[0])
    return leaving


def storages_of(node: fx.Node) -> set[int]:
    """Return the ids of the storages of a node's fake tensors, without those that are not strided or have no memory."""
    storages = map(_storage, torch.utils._pytree.tree_leaves(node.meta.get("val")))
    return {storage for storage in storages if storage is not None}


def _storage(value: object) -> int | None:
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return None
    try:
        return int(value.untyped_storage()._cdata)
    except NotImplementedError:  # a tensor without memory, such as an opaque one
        return None


def _key(value: Any) -> Any:
    """Return a hashable key of an argument: 1, 1.0 and True have different keys, a node is its own key."""
    if isinstance(value, fx.Node) or value is None:
        return value
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(item)) for name, item in value.items())
    if isinstance(value, float):
        return (float, value.hex())  # NaN equals itself, and 0.0 is not -0.0
    if isinstance(value, bool | int | str | torch.dtype | torch.device | torch.layout | torch.memory_format):
        return (type(value), value)
    raise _Unknown
