"""Finds the gathers of sharded parameters with their casts and views, and merges duplicate gathers and reductions.

If forward reads a parameter twice, the traced graph gathers it twice and reduces a gradient for each read.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from overlapc.fx.comm.labels import ParamLabel, label_of
from overlapc.fx.partitioning.duplicates import merge_equal, storages_of, storages_that_leave
from overlapc.fx.sizes import same_sizes

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

# Ops that only move or cast elements: they lie between a shard and its gather, and between the gathered parameter
# and its readers. Recomputing them is always better than keeping another copy of the parameter.
CARRIERS: frozenset[Any] = frozenset(
    {
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.alias.default,
        aten.detach.default,
        aten.t.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.as_strided.default,
        aten.constant_pad_nd.default,
        aten._to_copy.default,
        aten.clone.default,
        torch.ops.prims.convert_element_type.default,
        operator.getitem,
    }
)

_GATHERS = frozenset({_c10d.all_gather_into_tensor.default, _c10d.all_gather_into_tensor_coalesced.default})

# The ops that `fully_shard` applies to a gradient; f(x + y) == f(x) + f(y) holds for each.
_LINEAR: frozenset[Any] = CARRIERS - {operator.getitem} | {
    _c10d.reduce_scatter_tensor.default,
    _c10d.all_reduce.default,
    _c10d.wait_tensor.default,
    aten.div.Tensor,
}


@dataclass(frozen=True, slots=True)
class Gather:
    """One gather of a sharded parameter in a graph."""

    label: ParamLabel
    before: tuple[fx.Node, ...]  # casts, pads and views between the placeholder and `start`, in order
    start: fx.Node
    wait: fx.Node
    after: tuple[fx.Node, ...]  # views and casts of the gathered tensor

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes of the gather, in execution order."""
        return (*self.before, self.start, self.wait, *self.after)


def parameter_gathers(graph: fx.Graph) -> Iterator[Gather]:
    """Return every gather with a label of `fully_shard`, in graph order."""
    for start in graph.find_nodes(op="call_function", target=_c10d.all_gather_into_tensor.default, sort=True):
        label = label_of(start)
        wait = next((user for user in start.users if user.target is _c10d.wait_tensor.default), None)
        if label is None or wait is None:
            continue
        before: list[fx.Node] = []
        node = start.args[0]
        while isinstance(node, fx.Node) and node.target in CARRIERS:
            before.append(node)
            node = node.args[0]
        yield Gather(label, tuple(reversed(before)), start, wait, _carried(wait))


def whole_parameter_casts(graph: fx.Graph) -> Iterator[tuple[ParamLabel, tuple[fx.Node, ...]]]:
    """Return the casts of labelled parameters that this rank holds whole, each with its views and further casts."""
    for node in graph.find_nodes(op="call_function", target=aten._to_copy.default, sort=True):
        label, source = label_of(node), node.args[0]
        if label is None:
            continue
        while isinstance(source, fx.Node) and source.target in CARRIERS:
            source = source.args[0]
        carried = _carried(node)
        parameter = isinstance(source, fx.Node) and source.op == "placeholder" and "tangents" not in str(source.target)
        if parameter and not any(user.target in _GATHERS for each in (node, *carried) for user in each.users):
            yield label, (node, *carried)


def _carried(root: fx.Node) -> tuple[fx.Node, ...]:
    """Return all views and casts of `root`, direct or indirect, that have no other input."""
    found: dict[fx.Node, None] = {}
    pending = list(root.users)
    while pending:
        node = pending.pop()
        if node not in found and node.target in CARRIERS and len(node.all_input_nodes) == 1:
            found[node] = None
            pending.extend(node.users)
    return tuple(found)


def merge_gathers(graph: fx.Graph) -> int:
    """Merge equal gathers in an ATen graph, with their casts and pads; return the number of removed nodes.

    Those whose memory leaves the graph stay, because two equal results must be two tensors.
    """
    leaving = storages_that_leave(graph)
    for given in graph.find_nodes(op="placeholder"):  # views of an input share its memory, merged or not
        leaving -= storages_of(given)
    wanted: set[fx.Node] = set()
    for start in graph.nodes:
        if start.target in _GATHERS:
            wanted.update((start, *_carriers_before(start), *_waits_behind(start)))
    wanted = {node for node in wanted if storages_of(node).isdisjoint(leaving)}
    return merge_equal(graph, lambda node: "gathered" if node in wanted else None)


def _carriers_before(start: fx.Node) -> Iterator[fx.Node]:
    """Return the casts, pads and views that a launch's inputs are computed with."""
    seen: set[fx.Node] = set()
    pending = list(start.all_input_nodes)
    while pending:
        node = pending.pop()
        if node.target in CARRIERS and node not in seen:
            seen.add(node)
            yield node
            pending.extend(node.all_input_nodes)


def _waits_behind(start: fx.Node) -> Iterator[fx.Node]:
    """Return the waits for a launch; for a coalesced one, the `getitem` nodes of its parts and their waits."""
    for user in start.users:
        if user.target is _c10d.wait_tensor.default:
            yield user
        elif user.target is operator.getitem:
            yield user
            yield from (wait for wait in user.users if wait.target is _c10d.wait_tensor.default)


def shard_pads(graph: fx.Graph) -> frozenset[str]:
    """Return the names of the nodes that pad this rank's shard of a parameter, which other ranks pad by other amounts.

    A rank that pads by nothing has a copy there, so its kernel may be equal to one that it differs from elsewhere.
    """
    pads = graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    return frozenset(node.name for node in pads if label_of(node) is not None)


def merge_reductions(graph: fx.Graph) -> int:
    """Add up a parameter's gradients before reducing them once; return the number of removed reductions.

        a = reduce(x); b = reduce(y); s = add(a, b)  ->  t = add(x, y); s = reduce(t)

    `reduce` is the whole labelled chain: cast, pad, scatter, wait, all-reduce, division, slice, cast.
    """
    merged = 0
    for add in graph.find_nodes(op="call_function", target=aten.add.Tensor, sort=True):
        if len(add.args) != 2 or add.kwargs or not all(isinstance(arg, fx.Node) for arg in add.args):
            continue
        pairs = _equal_chains(*add.args)
        if not any(node.target is _c10d.reduce_scatter_tensor.default for node, _ in pairs):
            continue
        early, late = pairs[-1]
        if late < early:
            pairs = [(second, first) for first, second in pairs]
            early, late = late, early
        # The later chain stays, because both gradients are computed before it.
        gradients = (early.all_input_nodes[0], late.all_input_nodes[0])
        with graph.inserting_before(late):
            total = graph.call_function(aten.add.Tensor, gradients)
        total.meta = {**late.meta, "val": gradients[1].meta["val"]}
        total.meta.pop("tensor_meta", None)
        late.replace_input_with(gradients[1], total)
        add.replace_all_uses_with(pairs[0][1])
        graph.erase_node(add)
        for duplicate, _ in pairs:
            graph.erase_node(duplicate)
        merged += 1
    return merged


def _equal_chains(first: fx.Node, second: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Return pairs of equal nodes in the chains that reduce two gradients of one parameter, last pair first."""
    pairs: list[tuple[fx.Node, fx.Node]] = []
    label = label_of(first)
    while (
        label is not None
        and first is not second
        and label_of(first) == label == label_of(second)
        and first.target is second.target
        and first.target in _LINEAR
        and first.kwargs == second.kwargs
        and first.args[1:] == second.args[1:]
        and all(len(node.users) == 1 and len(node.all_input_nodes) == 1 for node in (first, second))
        and _same_shape(first.all_input_nodes[0], second.all_input_nodes[0])
    ):
        pairs.append((first, second))
        first, second = first.all_input_nodes[0], second.all_input_nodes[0]
    return pairs


def _same_shape(first: fx.Node, second: fx.Node) -> bool:
    one, other = first.meta.get("val"), second.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return False
    return same_sizes(one.shape, other.shape) and one.dtype == other.dtype
