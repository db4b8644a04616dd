"""Reductions as an exchange and a sum: each rank receives all contributions to its part, and adds them up itself.

    r = wait(reduce_scatter(cast(g), "avg"))
 -> p = wait(exchange(g)); r = sum_of_parts(g[rank], p, rank) / ranks

A ring reduces at each hop, so data are sent in the dtype of the sum. Here gradients are sent as they were computed
(half the bytes for bfloat16), added in float32 in the order of ranks, and rounded once. The sum is element-wise, so it
fuses with its readers into one generated kernel. It reads this rank's own part from the input, and the other ranks'
parts from the result of the exchange. It is a single op because ranks have to plan the same graph: in a chain of
additions, the first one that needs the exchange would differ between ranks. An all-reduce becomes the same, followed
by a gather of the sums:

    r = wait(all_reduce(cast(g), "sum"))
 -> p = wait(exchange(flat(g))); s = sum_of_parts(flat(g)[rank], p, rank); r = wait(all_gather(s))

A group with several ranks on each of several hosts first adds up within each host; the library then reduces across
hosts, in float32, one share for each rank of a host. Gathers go the other way: first across hosts, among the ranks that
have the same place on their hosts, then within each host.

    r = wait(reduce_scatter(cast(g), "avg"))
 -> p = wait(exchange(g, within, blocks=hosts)); s = sum_of_parts(g[:, rank], p, rank)
    r = wait(reduce_scatter(s, "sum", across)) / ranks

    w = wait(all_gather(p))
 -> a = wait(all_gather(p, across)); w = wait(gather_blocks(a, within, blocks=hosts))
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, fx

from overlapc.fx.arguments import argument, declared_arguments
from overlapc.fx.node_writer import FakeResults, NodeWriter
from overlapc.fx.versions.sharding import resolve_group

aten, prims, _c10d = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional

_library = torch.library.Library("overlapc", "FRAGMENT")
_library.define("exchange(Tensor given, int ranks, str group_name, int blocks=1) -> Tensor")
_library.define("gather_blocks(Tensor shard, int ranks, str group_name, int blocks) -> Tensor")
_library.define("sum_of_parts(Tensor own, Tensor others, int rank, ScalarType dtype) -> Tensor")
EXCHANGE = torch.ops.overlapc.exchange.default
GATHER_BLOCKS = torch.ops.overlapc.gather_blocks.default
SUM_OF_PARTS = torch.ops.overlapc.sum_of_parts.default


def _fake_exchange(given: Tensor, ranks: int, group: str, blocks: int = 1) -> Tensor:
    return given.new_empty((given.shape[0] // ranks * (ranks - 1), *given.shape[1:]))


def _fake_gather(shard: Tensor, ranks: int, group: str, blocks: int) -> Tensor:
    return shard.new_empty((shard.shape[0] * ranks, *shard.shape[1:]))


def _fake_sum(own: Tensor, others: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    return own.new_empty(own.shape, dtype=dtype)


# These two implementations serve graphs that run without the copy transport, so they block inside. Where copies carry
# out a collective, they are not called.


@torch.library.impl(_library, "exchange", "CompositeExplicitAutograd")
def exchanged(given: Tensor, ranks: int, group: str, blocks: int = 1) -> Tensor:
    """Return the parts that the other ranks have for this one in an all-to-all of equal parts, in order of rank.

    In a graph, the result must be waited for. blocks: number of blocks in `given`, each of which has a part for every
    rank; the parts that one rank sends to another are adjacent in the result.
    """
    rows = given.shape[0] // ranks
    sent = given.unflatten(0, (blocks, ranks, -1)).transpose(0, 1).flatten(0, 2).contiguous()
    parts = _c10d.wait_tensor(_c10d.all_to_all_single(sent, [rows] * ranks, [rows] * ranks, group))
    own = dist.get_rank(resolve_group(group)) * rows
    return torch.cat([parts[:own], parts[own + rows :]])


@torch.library.impl(_library, "gather_blocks", "CompositeExplicitAutograd")
def gathered_blocks(shard: Tensor, ranks: int, group: str, blocks: int) -> Tensor:
    """Gather each block of `shard` by itself: the result has block after block, each in order of rank.

    In a graph, the result must be waited for.
    """
    parts = _c10d.wait_tensor(_c10d.all_gather_into_tensor(shard, ranks, group))
    return parts.unflatten(0, (ranks, blocks, -1)).transpose(0, 1).flatten(0, 2).contiguous()


@torch.library.impl(_library, "sum_of_parts", "CompositeExplicitAutograd")
def summed_parts(own: Tensor, others: Tensor, rank: int, dtype: torch.dtype) -> Tensor:
    """Return the sum of all ranks' parts, each converted to `dtype`, added in the order of ranks.

    own: this rank's part. others: the other ranks' parts, in order of rank along a dim before the dims of `own`.
    """
    total, *parts = (part.to(dtype) for part in (*others[:rank], own, *others[rank:]))
    for part in parts:
        total = total + part
    return total.contiguous()


torch.library.register_fake("overlapc::exchange", _fake_exchange, lib=_library)
torch.library.register_fake("overlapc::gather_blocks", _fake_gather, lib=_library)
torch.library.register_fake("overlapc::sum_of_parts", _fake_sum, lib=_library)


def blocks_of(target: Any, args: Sequence[Any]) -> int:
    """Return the number of blocks of a collective, each of which is gathered or exchanged by itself."""
    given = {declared.name: value for declared, value in declared_arguments(target, args, {})}
    return int(given.get("blocks", 1))


_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
# Ops that move elements and compute nothing, so that a cast may come after them as well as before.
_MOVES = frozenset(
    {
        aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.alias.default, aten.detach.default,
        aten.t.default, aten.transpose.int, aten.permute.default, aten.unsqueeze.default, aten.squeeze.dim,
        aten.slice.Tensor, aten.clone.default, aten.constant_pad_nd.default, aten.cat.default,
    }
)  # fmt: skip


REDUCTIONS = (_c10d.reduce_scatter_tensor.default, _c10d.all_reduce.default)


class RankInGroup(NamedTuple):
    """This rank's place in a process group: among all its ranks, or, over several hosts, among those on its host."""

    rank: int
    ranks: int
    hosts: int = 1
    within: str = ""  # with several hosts: torch's name of the group of the ranks on this host
    across: str = ""  # with several hosts: torch's name of the group of the ranks with this place on every host


def exchange_reductions(graph_module: fx.GraphModule, place_of: Callable[[fx.Node], RankInGroup | None]) -> int:
    """Rewrite reductions of a canonical graph; return the number of rewritten ones.

    place_of: returns this rank's place in the group of a reduction, or None to leave that reduction unchanged.
    """
    graph = graph_module.graph
    count = 0
    results = FakeResults()  # the reductions of equal layers are alike
    for start in list(graph.nodes):
        if may_be_exchanged(start):
            place = place_of(start)
            if place is not None:
                _exchange(start, place, results)
                count += 1
    if count:
        graph.eliminate_dead_code(_is_impure)
        graph.lint()
        graph_module.recompile()
    return count


def gather_by_hosts(start: fx.Node, place: RankInGroup) -> None:
    """Rewrite a gather over several hosts in a canonical graph: first across hosts, then within each."""
    (wait,) = start.users
    write = NodeWriter(start, start)
    across = write.call(_c10d.all_gather_into_tensor.default, argument(start, 0), place.hosts, place.across)
    arrived = write.call(_c10d.wait_tensor.default, across)
    within = write.call(GATHER_BLOCKS, arrived, place.ranks, place.within, place.hosts)
    wait.replace_all_uses_with(NodeWriter(wait, start).call(_c10d.wait_tensor.default, within))
    wait.graph.erase_node(wait)
    start.graph.erase_node(start)


def may_be_exchanged(start: fx.Node) -> bool:
    """Whether a node starts a reduction that can be written as an exchange and a sum."""
    return start.op == "call_function" and start.target in REDUCTIONS and refusal(start) is None


def travelling_bytes(start: fx.Node) -> int:
    """Return the bytes that the exchange of a reduction moves: those of its input before casts that are exact."""
    given: fx.Node = argument(start, 0)
    value: Tensor = given.meta["val"]
    return value.numel() * _narrowest(given).itemsize


def refusal(start: fx.Node) -> str | None:
    """Return the reason why a reduction cannot be an exchange and a sum; None if it can."""
    if start.target not in REDUCTIONS:
        return "it reduces several tensors"
    given = argument(start, 0).meta["val"]
    if argument(start, 1) not in ("sum", "avg"):
        return f"its reduction is {argument(start, 1)!r}"
    if not given.dtype.is_floating_point:
        return f"its dtype is {given.dtype}"
    if not all(isinstance(size, int) for size in given.shape):
        return "its size is symbolic"
    if start.target is _c10d.all_reduce.default and not given.is_contiguous():
        return "its result is not contiguous"
    if len(start.users) != 1 or next(iter(start.users)).target is not _c10d.wait_tensor.default:
        return "its wait is in another graph"
    return None


def _is_impure(node: fx.Node) -> bool:
    """Whether dead-code elimination must keep a node: all except casts and moves, which this rewrite leaves unread."""
    return node.op in ("placeholder", "output") or (node.target not in _MOVES and node.target not in _CASTS)


def _exchange(start: fx.Node, place: RankInGroup, results: FakeResults) -> None:
    (wait,) = start.users
    rank, ranks, hosts = place.rank, place.ranks, place.hosts
    how, whole = argument(start, 1), start.target is _c10d.all_reduce.default
    group = place.within or argument(start, 2 if whole else 3)
    blocks = [] if whole or hosts == 1 else [hosts]
    reduced: Tensor = argument(start, 0).meta["val"]
    dtype = reduced.dtype
    write = NodeWriter(start, start, results=results)
    given = _as_computed(argument(start, 0), dtype, write)
    if whole:
        given = _padded(write, given, ranks)
    elif not given.meta["val"].is_contiguous():
        given = write.call(aten.clone.default, given, memory_format=torch.contiguous_format)
    value: Tensor = given.meta["val"]
    rows = value.shape[0] // math.prod(blocks, start=ranks)
    sent = write.call(EXCHANGE, given, ranks, group, *blocks)
    write = NodeWriter(wait, start, results=results)
    arrived = write.call(_c10d.wait_tensor.default, sent)
    parts = write.call(aten.view.default, arrived, [ranks - 1, *blocks, rows, *value.shape[1:]])
    here = write.call(aten.view.default, given, [*blocks, ranks, rows, *value.shape[1:]])
    own = write.call(aten.select.int, here, len(blocks), rank)
    adds_in = torch.float64 if dtype == torch.float64 else torch.float32
    total = write.call(SUM_OF_PARTS, own, parts, rank, adds_in)
    if hosts > 1:
        total = _across_hosts(write, total, place, whole=whole)
    if how == "avg":
        total = write.call(aten.div.Tensor, total, ranks * hosts)
    result = _cast(write, total, dtype)
    if whole:
        gathered = write.call(_c10d.all_gather_into_tensor.default, result, ranks, group)
        result = write.call(_c10d.wait_tensor.default, gathered)
        if rows * ranks > reduced.numel():
            result = write.call(aten.slice.Tensor, result, 0, 0, reduced.numel())
        result = write.call(aten.view.default, result, list(reduced.shape))
    wait.replace_all_uses_with(result)
    wait.graph.erase_node(wait)
    start.graph.erase_node(start)


def _across_hosts(write: NodeWriter, total: fx.Node, place: RankInGroup, *, whole: bool) -> fx.Node:
    """Reduce the sums of this host across hosts: all of them (`whole`), or only this host's block."""
    if whole:
        started = write.call(_c10d.all_reduce.default, total, "sum", place.across)
    else:
        shape = total.meta["val"].shape
        flat = write.call(aten.view.default, total, [shape[0] * shape[1], *shape[2:]])
        started = write.call(_c10d.reduce_scatter_tensor.default, flat, "sum", place.hosts, place.across)
    return write.call(_c10d.wait_tensor.default, started)


def _padded(write: NodeWriter, node: fx.Node, ranks: int) -> fx.Node:
    """Return `node` flattened, padded with zeros to a multiple of `ranks` elements."""
    value: Tensor = node.meta["val"]
    if not value.is_contiguous():
        node = write.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    flat = write.call(aten.view.default, node, [value.numel()])
    missing = -value.numel() % ranks
    return write.call(aten.constant_pad_nd.default, flat, [0, missing]) if missing else flat


def _cast(write: NodeWriter, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if node.meta["val"].dtype == dtype:
        return node
    return write.call(prims.convert_element_type.default, node, dtype)


def _as_computed(node: fx.Node, dtype: torch.dtype, write: NodeWriter) -> fx.Node:
    """Return `node` without its casts up to `dtype`, but with its moves; itself if it was not cast."""
    narrow = _narrowest(node)
    return node if narrow == dtype else _without_casts(node, narrow, write)


def _narrowest(node: fx.Node) -> torch.dtype:
    """Return the dtype of `node` before exact casts; its own dtype if its inputs had several."""
    dtype: torch.dtype = node.meta["val"].dtype
    if node.target in _CASTS and _widens(node):
        return _narrowest(argument(node, 0))
    if node.target not in _MOVES or not _pads_with_zero(node):
        return dtype
    found = {_narrowest(source) for source in node.all_input_nodes}
    return found.pop() if len(found) == 1 else dtype


def _widens(cast: fx.Node) -> bool:
    """Whether a cast is exact, and changes neither shape nor device."""
    before, after = argument(cast, 0).meta["val"], cast.meta["val"]
    exact = before.dtype in (torch.bfloat16, torch.float16) and after.dtype in (torch.float32, torch.float64)
    return exact and before.device == after.device and before.shape == after.shape


def _pads_with_zero(node: fx.Node) -> bool:
    return node.target is not aten.constant_pad_nd.default or len(node.args) < 3 or argument(node, 2) == 0


def _without_casts(node: fx.Node, narrow: torch.dtype, write: NodeWriter) -> fx.Node:
    """Return `node` recomputed without the casts behind dtype `narrow`."""
    if node.meta["val"].dtype == narrow:
        return node
    if node.target in _CASTS:
        return _without_casts(argument(node, 0), narrow, write)
    sources = {source: _without_casts(source, narrow, write) for source in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), sources.__getitem__)
    return write.call(node.target, *args, **kwargs)
