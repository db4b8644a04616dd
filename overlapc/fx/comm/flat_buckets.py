"""Splits FSDP2's flat buckets into one collective for each tensor (S22 in docs/COVERAGE.md).

FSDP2 copies the shards of a group into one flat tensor, gathers that, and copies every parameter out again; gradients
are divided into chunks, copied into one tensor, reduced, and read through strided views. Without the copies, this is

    flat = copy_in(a, b); g = wait(all_gather(flat)); split_copy(g, out=[x, y])   ->  x = wait(all_gather(a)); y = ...
    flat = chunk_cat(u, v); r = wait(reduce_scatter(flat)); as_strided(r, ...)    ->  wait(reduce_scatter(u)); ...

because the gathered shard of one tensor *is* the tensor, and the scatter takes a full gradient as it is. The group
remains a unit, which `passes/bucket.py` merges again into one launch on the tensors in place, without copies. Ops of
other forms become plain ATen ops, for which kernels are generated and fused.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.fsdp  # registers the ops
from torch import Tensor, fx
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._prims_common import make_contiguous_strides_for

from overlapc.fx.arguments import argument
from overlapc.fx.comm.labels import ParamLabel
from overlapc.fx.node_writer import NodeWriter

aten, fsdp, _c10d = torch.ops.aten, torch.ops.fsdp, torch.ops._c10d_functional
_WAIT = _c10d.wait_tensor.default
_VIEWS = frozenset({aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default})
# Ops between a flat reduction and the views of its result: they do the same to every element.
_BETWEEN = frozenset(
    {aten.div.Tensor, aten.mul.Tensor, aten._to_copy.default, torch.ops.prims.convert_element_type.default}
)


@dataclass
class _Flat:
    """The parts of flat tensors, by the node of the flat tensor."""

    shards: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # one-dimensional
    gradients: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # padded to equal chunks on dim 0
    replaced: list[fx.Node] = field(default_factory=list)  # readers before the nodes they read


def split_buckets(graph: fx.Graph) -> int:
    """Split every bucket of the graph; return the number of FSDP2's ops that were replaced."""
    flat, replaced = _Flat(), 0
    for node in list(graph.nodes):
        if node.target is fsdp.all_gather_copy_in.default:
            _copy_in(node, flat)
        elif node.target is auto_functionalized_v2 and argument(node, 0) is fsdp.split_with_sizes_copy.default:
            if not _copy_out(node, flat):
                continue
        elif node.target is auto_functionalized_v2 and argument(node, 0) is fsdp.chunk_cat.default:
            if not _chunk_cat(node, flat):
                continue
        elif node.target is _c10d.reduce_scatter_tensor.default:
            _split_reduction(node, flat)
            continue
        else:
            continue
        replaced += 1
        flat.replaced = [*node.users, node, *flat.replaced]
    for node in dict.fromkeys(flat.replaced):
        if not node.users:
            graph.erase_node(node)
    return replaced


def _copy_in(node: fx.Node, flat: _Flat) -> None:
    """Replace `all_gather_copy_in(inputs, out, sizes, numel, rank) -> (this rank's part of out, out)`."""
    inputs, out, numel, rank = (argument(node, at) for at in (0, 1, 3, 4))
    write = NodeWriter(node, node)
    dtype = out.meta["val"].dtype
    parts = [_flattened(write, _cast(write, each, dtype)) for each in inputs]
    mine = write.call(aten.cat.default, parts)
    flat.shards[mine] = parts
    for item in list(node.users):
        if argument(item, 1) == 0:
            item.replace_all_uses_with(mine)
        elif item.users:  # a read of the whole buffer, in which only this rank's part is known
            at = rank * numel
            whole = write.call(aten.slice_scatter.default, out, mine, 0, at, at + numel)
            item.replace_all_uses_with(whole)


def _copy_out(node: fx.Node, flat: _Flat) -> bool:
    """Replace `split_with_sizes_copy(gathered.view(ranks, -1), sizes, dim=1, out=…)`; return False if it stays."""
    gathered, sizes = argument(node, "all_gather_output"), argument(node, "all_gather_input_split_sizes")
    outs = [base for at in range(len(sizes)) if (base := _base(node, f"out_{at}")) is not None]
    if argument(node, "dim") != 1 or len(outs) < len(sizes):
        return False
    results = _results(node)
    dtype = gathered.meta["val"].dtype
    if any(argument(node, "_all_bases")[base].meta["val"].dtype != dtype for base in outs):
        return False
    start, path = _source(gathered, _c10d.all_gather_into_tensor.default)
    shards = flat.shards.get(argument(start, 0)) if start is not None else None
    alone = all(len(each.users) == 1 for each in path)
    if start is not None and shards is not None and alone and [_numel(each) for each in shards] == list(sizes):
        parts = _gathered_apart(node, start, shards)
        flat.replaced = [*path, *flat.replaced]
    else:
        write = NodeWriter(node, node)
        pieces = write.call(aten.split_with_sizes.default, gathered, list(sizes), 1)
        parts = [_contiguous(write, _item(write, pieces, at)) for at in range(len(sizes))]
    for base, part in zip(outs, parts, strict=True):
        result = results.get(base)
        if result is not None:
            write = NodeWriter(node, node)
            shape = list(argument(node, "_all_bases")[base].meta["val"].shape)
            result.replace_all_uses_with(write.call(aten.view.default, part, shape))
    return True


def _gathered_apart(node: fx.Node, start: fx.Node, shards: list[fx.Node]) -> list[fx.Node]:
    """Gather each shard where the flat gather starts, and wait for each before `node`; return the waits."""
    starts = [_launcher(start, start, at).call(start.target, shard, *start.args[1:]) for at, shard in enumerate(shards)]
    return [_launcher(node, start, at).call(_WAIT, each) for at, each in enumerate(starts)]


def _chunk_cat(node: fx.Node, flat: _Flat) -> bool:
    """Replace `chunk_cat(gradients, 0, ranks, out=flat.view(ranks, -1))`; return False if it stays."""
    base = _base(node, "out")
    if base is None or argument(node, "dim") != 0:
        return False
    write = NodeWriter(node, node)
    ranks: int = argument(node, "num_chunks")
    into: Tensor = argument(node, "_all_bases")[base].meta["val"]
    padded = []
    for each in argument(node, "tensors"):
        gradient = _contiguous(write, _cast(write, each, into.dtype))
        value = gradient.meta["val"]
        missing = -value.shape[0] % ranks
        if missing:
            sides = [0] * (2 * (value.ndim - 1)) + [0, missing]
            gradient = write.call(aten.constant_pad_nd.default, gradient, sides)
        padded.append(gradient)
    rows = [write.call(aten.view.default, each, [ranks, -1]) for each in padded]
    whole = write.call(aten.view.default, write.call(aten.cat.default, rows, 1), list(into.shape))
    flat.gradients[whole] = padded
    result = _results(node).get(base)
    if result is not None:
        result.replace_all_uses_with(whole)
    return True


def _split_reduction(start: fx.Node, flat: _Flat) -> None:
    """Reduce the gradients of a flat bucket one by one, if all readers of its result are views of one gradient."""
    flat_input = argument(start, 0)
    while isinstance(flat_input, fx.Node) and flat_input not in flat.gradients and flat_input.target in _VIEWS:
        flat_input = argument(flat_input, 0)
    gradients = flat.gradients.get(flat_input)
    wait = next(iter(start.users), None)
    if gradients is None or wait is None or wait.target is not _WAIT or len(start.users) > 1:
        return
    between, views = _readers(wait)
    ranks: int = argument(start, 2)
    offsets = [0, *itertools.accumulate(_numel(each) // ranks for each in gradients)]
    if not all(_part_of(view, gradients, offsets, ranks) is not None for view in views) or not views:
        return
    reduced = [
        _launcher(start, start, at).call(start.target, each, *start.args[1:]) for at, each in enumerate(gradients)
    ]
    reduced = [_launcher(wait, start, at).call(_WAIT, each) for at, each in enumerate(reduced)]
    for step in between:
        reduced = [
            _launcher(step, start, at).call(step.target, each, *step.args[1:], **step.kwargs)
            for at, each in enumerate(reduced)
        ]
    for view in views:
        at = _part_of(view, gradients, offsets, ranks)
        assert at is not None
        size: list[int] = list(argument(view, 1))
        write = NodeWriter(view, view)
        part = reduced[at]
        # Ranks without padding slice, too, because all ranks must have the same nodes.
        if gradients[at].target is aten.constant_pad_nd.default:
            part = write.call(aten.slice.Tensor, part, 0, 0, size[0])
        view.replace_all_uses_with(part)
    flat.replaced = [*views, *reversed(between), wait, start, *flat.replaced]


def _readers(wait: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return (the ops on the whole flat reduction, in order; the strided views of their result)."""
    between: list[fx.Node] = []
    current = wait
    while len(current.users) == 1:
        (user,) = current.users
        elementwise = user.target in _BETWEEN and argument(user, 0) is current and len(user.all_input_nodes) == 1
        if not elementwise and user.target not in (_c10d.all_reduce.default, _WAIT):
            break
        between.append(user)
        current = user
    readers = list(current.users)
    if any(reader.target is not aten.as_strided.default for reader in readers):
        return between, []
    return between, readers


def _part_of(view: fx.Node, gradients: list[fx.Node], offsets: list[int], ranks: int) -> int | None:
    """Return the index of the gradient whose shard a strided view reads; None unless it reads the first rows of one."""
    size: list[int] = list(argument(view, 1))
    offset = argument(view, 3) or 0
    if offset not in offsets[:-1] or tuple(argument(view, 2)) != make_contiguous_strides_for(size):
        return None
    # A gradient without elements begins where the next one does.
    for at, gradient in enumerate(gradients):
        shape = gradient.meta["val"].shape
        if offsets[at] == offset and list(shape[1:]) == size[1:] and size[0] <= shape[0] // ranks:
            return at
    return None


def _launcher(anchor: fx.Node, start: fx.Node, number: int) -> NodeWriter:
    """Return a writer of nodes for the `number`-th tensor of a bucket, labelled with the bucket as their unit."""
    label = ParamLabel(group=start.name, param=f"{start.name}.{number}", axis="")
    return NodeWriter(anchor, start, label.as_annotation())


def _source(node: fx.Node, launch: Any) -> tuple[fx.Node | None, list[fx.Node]]:
    """Return the node of `launch` whose result `node` is, behind a wait and views, and the path from `node` to it."""
    path = [node]
    while path[-1].target in _VIEWS:
        path.append(argument(path[-1], 0))
    if path[-1].target is not _WAIT:
        return None, path
    path.append(argument(path[-1], 0))
    return (path[-1] if path[-1].target is launch else None), path


def _base(node: fx.Node, name: str) -> int | None:
    """Return the index of the base tensor that argument `name` of a functionalized op covers completely, or None."""
    index = argument(node, f"_{name}_base_index")
    if not isinstance(index, int):
        return None
    base: Tensor = argument(node, "_all_bases")[index].meta["val"]
    if argument(node, f"_{name}_alias"):
        return index if base.is_contiguous() else None
    size = argument(node, f"_{name}_size")
    if size is None or argument(node, f"_{name}_storage_offset") != 0:
        return None
    whole = math.prod(size) == base.numel() and base.is_contiguous()
    return index if whole and tuple(argument(node, f"_{name}_stride")) == make_contiguous_strides_for(size) else None


def _results(node: fx.Node) -> dict[int, fx.Node]:
    """Return, by base, the nodes that hold the bases after a functionalized op that has no other results."""
    return {argument(user, 1) - 1: user for user in node.users if argument(user, 1)}


def _cast(write: NodeWriter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if node.meta["val"].dtype == dtype:
        return node
    return write.call(torch.ops.prims.convert_element_type.default, node, dtype)


def _contiguous(write: NodeWriter, node: fx.Node) -> fx.Node:
    if node.meta["val"].is_contiguous():
        return node
    return write.call(aten.clone.default, node, memory_format=torch.contiguous_format)


def _flattened(write: NodeWriter, node: fx.Node) -> fx.Node:
    return node if node.meta["val"].ndim == 1 else write.call(aten.view.default, _contiguous(write, node), [-1])


def _item(write: NodeWriter, pieces: fx.Node, at: int) -> fx.Node:
    return write.call(operator.getitem, pieces, at)


def _numel(node: fx.Node) -> int:
    return int(node.meta["val"].numel())
