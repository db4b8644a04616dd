"""Sharded parameters in a graph: finds each gather with its casts and views; merges duplicates.

A parameter that forward reads twice is gathered twice as traced, and each read reduces its own gradient.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from overlapc.fx.duplicates import merge_equal
from overlapc.fx.labels import ParamLabel, label_of

aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

# One tensor in, the same numbers out: what lies between a shard and its gather, and between a gathered
# parameter and the op that computes with it. None of them is worth keeping a copy of the parameter for.
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

# What `fully_shard` does to a gradient: f(x + y) == f(x) + f(y) for each of them.
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
    before: tuple[fx.Node, ...]  # casts, pads and views from the placeholder on, in order
    start: fx.Node
    wait: fx.Node
    after: tuple[fx.Node, ...]  # views and casts of the gathered tensor

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """All nodes of the gather, in execution order."""
        return (*self.before, self.start, self.wait, *self.after)


def parameter_gathers(graph: fx.Graph) -> Iterator[Gather]:
    """Every gather that `fully_shard` labelled, in graph order."""
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
    """The casts of labelled parameters that lie whole on this rank, each with the views and casts of its result."""
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
    """All views and casts of `root`, and of those, as far as they hold nothing but `root`."""
    found: dict[fx.Node, None] = {}
    pending = list(root.users)
    while pending:
        node = pending.pop()
        if node not in found and node.target in CARRIERS and len(node.all_input_nodes) == 1:
            found[node] = None
            pending.extend(node.users)
    return tuple(found)


def merge_gathers(graph: fx.Graph) -> int:
    """Merge equal gathers in an ATen graph, with their casts and pads; returns how many nodes it removed."""
    wanted: set[fx.Node] = set()
    for start in graph.nodes:
        if start.target in _GATHERS:
            wanted.update((start, *_carriers_before(start), *_waits_behind(start)))
    return merge_equal(graph, lambda node: "gathered" if node in wanted else None)


def _carriers_before(start: fx.Node) -> Iterator[fx.Node]:
    """Casts, pads and views through which a launch's inputs pass."""
    seen: set[fx.Node] = set()
    pending = list(start.all_input_nodes)
    while pending:
        node = pending.pop()
        if node.target in CARRIERS and node not in seen:
            seen.add(node)
            yield node
            pending.extend(node.all_input_nodes)


def _waits_behind(start: fx.Node) -> Iterator[fx.Node]:
    """The waits for a launch; of a coalesced one also those for its parts."""
    for user in start.users:
        if user.target is _c10d.wait_tensor.default:
            yield user
        elif user.target is operator.getitem:
            yield user
            yield from (wait for wait in user.users if wait.target is _c10d.wait_tensor.default)


def merge_reductions(graph: fx.Graph) -> int:
    """Reduces the sum of a parameter's gradients in place of each one; returns how many it removed.

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
        # The later chain stays, where both gradients are at hand.
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
    """Pairs of equal nodes in the chains that reduce two gradients of one parameter, from the end up."""
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
    return one.shape == other.shape and one.dtype == other.dtype
