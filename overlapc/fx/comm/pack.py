"""Copies small tensors of a module into one flat tensor for their collective, where that costs less than a bucket.

    a = wait(all_gather(p)); b = wait(all_gather(q))  ->  flat = wait(all_gather(cat(p, q))); a, b = copies out of flat
    a = wait(reduce_scatter(g)); b = ...(h)           ->  flat = wait(reduce_scatter(chunks of g and h)); a, b = ...

A bucket of `passes/bucket.py` needs no copies, but every tensor in it adds to its time (`coalesced_tensor_ns`). Copying
norms and biases takes less: the copies are plain ATen ops, so casts and pads before them, and the readers of the
results, fuse with them into generated kernels. Large tensors are not copied.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from overlapc.fx.arguments import argument
from overlapc.fx.comm.gathers import CARRIERS, parameter_gathers
from overlapc.fx.comm.labels import ParamLabel, label_of
from overlapc.fx.node_writer import NodeWriter

aten, _c10d = torch.ops.aten, torch.ops._c10d_functional


@dataclass(frozen=True, slots=True)
class CopyCosts:
    """Costs from which packing is decided, in ns; equal on all ranks."""

    tensor_ns: float  # time that one more tensor adds to a coalesced collective
    kernel_ns: float  # time of a kernel that does next to nothing
    byte_ns: float  # time to read or write one byte of device memory

    def saved_ns(self, sent_bytes: int, received_bytes: int) -> float:
        """Return the time that copying one tensor in and out saves, in ns; negative if copying takes longer."""
        return self.tensor_ns - self.kernel_ns - 2 * (sent_bytes + received_bytes) * self.byte_ns


@dataclass(frozen=True, slots=True)
class _Member:
    """One collective of a sharded parameter."""

    label: ParamLabel
    start: fx.Node
    wait: fx.Node
    moves: tuple[fx.Node, ...]  # casts and views before a gather; the nodes that depend on a reduction's result

    @property
    def input(self) -> Tensor:
        """The collective's input, as a fake tensor."""
        return _value(argument(self.start, 0))

    @property
    def alike(self) -> tuple[Any, ...]:
        """The properties that all members of one flat tensor must share."""
        return (self.label.group, self.start.target, str(self.start.args[1:]), self.input.dtype)


def pack(graph_module: fx.GraphModule, costs: CopyCosts) -> int:
    """Pack tensors of a canonical graph where that saves time; return the number of packed tensors."""
    graph = graph_module.graph
    packed = 0
    for find, write in ((_gathers, _pack_gathers), (_reductions, _pack_reductions)):
        for members in _worth_it(find(graph), costs):
            write(members)
            packed += len(members)
            for member in members:
                graph.erase_node(member.wait)
                graph.erase_node(member.start)
    if packed:
        graph.lint()
        graph_module.recompile()
    return packed


def packed_starts(graph: fx.Graph, costs: CopyCosts) -> set[fx.Node]:
    """Return the collectives that `pack` would pack."""
    runs = (members for find in (_gathers, _reductions) for members in _worth_it(find(graph), costs))
    return {member.start for members in runs for member in members}


def _gathers(graph: fx.Graph) -> Iterator[_Member]:
    """Return the gathers of a graph input behind casts and views only, so that they can start anywhere."""
    for found in parameter_gathers(graph):
        made_of = argument((*found.before, found.start)[0], 0)
        if isinstance(made_of, fx.Node) and made_of.op == "placeholder":
            yield _Member(found.label, found.start, found.wait, found.before)


def _reductions(graph: fx.Graph) -> Iterator[_Member]:
    """Return the reductions whose results are only returned by the graph, so that they can end anywhere."""
    for start in graph.find_nodes(op="call_function", target=_c10d.reduce_scatter_tensor.default, sort=True):
        label, wait = label_of(start), next(iter(start.users), None)
        if label is None or wait is None or len(start.users) > 1:
            continue
        behind: dict[fx.Node, None] = {}
        pending = list(wait.users)
        while pending:
            node = pending.pop(0)
            if node.op != "output" and node not in behind:
                behind[node] = None
                pending.extend(node.users)
        ours = (label_of(node) == label or node.target in CARRIERS for node in behind)
        if all(ours) and all(len(node.all_input_nodes) == 1 for node in behind):
            yield _Member(label, start, wait, tuple(behind))


def _worth_it(members: Iterable[_Member], costs: CopyCosts) -> Iterator[list[_Member]]:
    """Yield, for each run of members that are alike, the ones that are faster to copy, if packing them saves time."""
    viewed = [member for member in members if member.input.is_contiguous()]  # as one dim
    for _, run in itertools.groupby(viewed, key=lambda member: member.alike):
        saved_ns = {member: _saved_ns(member, costs) for member in run}
        small = [member for member, ns in saved_ns.items() if ns > 0]
        if len(small) > 1 and sum(saved_ns[member] for member in small) > costs.tensor_ns + costs.kernel_ns:
            yield small


def _saved_ns(member: _Member, costs: CopyCosts) -> float:
    sizes = [each.numel() * each.element_size() for each in (member.input, _value(member.wait))]
    if not all(isinstance(size, int) for size in sizes):
        return 0.0
    return costs.saved_ns(*sizes)


def _pack_gathers(members: Sequence[_Member]) -> None:
    """Gather `members` at once where the first one started, and copy from the result where the first one waited."""
    first = members[0]
    for node in itertools.chain.from_iterable(member.moves for member in members):
        if first.start < node:
            first.start.prepend(node)
    ranks = argument(first.start, 1)
    write = _writer(first.start, members)
    shards = [write.call(aten.view.default, argument(member.start, 0), [-1]) for member in members]
    flat = write.call(first.start.target, write.call(aten.cat.default, shards), *first.start.args[1:])
    write = _writer(first.wait, members)
    rows = write.call(aten.view.default, write.call(first.wait.target, flat), [ranks, -1])
    pieces = write.call(aten.split_with_sizes.default, rows, [_value(shard).numel() for shard in shards], 1)
    for at, member in enumerate(members):
        _copied_out(write, write.call(operator.getitem, pieces, at), member)


def _pack_reductions(members: Sequence[_Member]) -> None:
    """Reduce `members` at once where the last one started, and copy from the result where the last one waited."""
    last = members[-1]
    ranks = argument(last.start, 2)
    write = _writer(last.start, members)
    chunks = [write.call(aten.view.default, argument(member.start, 0), [ranks, -1]) for member in members]
    whole = write.call(aten.view.default, write.call(aten.cat.default, chunks, 1), [-1])
    flat = write.call(last.start.target, whole, *last.start.args[1:])
    write = _writer(last.wait, members)
    waited = write.call(last.wait.target, flat)
    pieces = write.call(aten.split_with_sizes.default, waited, [_value(member.wait).numel() for member in members])
    behind = last.wait
    for at, member in enumerate(members):
        _copied_out(write, write.call(operator.getitem, pieces, at), member)
        for node in member.moves:
            behind.append(node)
            behind = node


def _copied_out(write: NodeWriter, piece: fx.Node, member: _Member) -> None:
    """Replace the member's result by a copy of `piece` in memory of its own."""
    copy = write.call(aten.clone.default, piece, memory_format=torch.contiguous_format)
    result = write.call(aten.view.default, copy, list(_value(member.wait).shape))
    member.wait.replace_all_uses_with(result)


def _writer(anchor: fx.Node, members: Sequence[_Member]) -> NodeWriter:
    label = replace(members[0].label, param=f"{members[0].label.param}+{len(members) - 1}")
    return NodeWriter(anchor, members[0].start, label.as_annotation())


def _value(node: fx.Node) -> Tensor:
    value: Tensor = node.meta["val"]
    return value
