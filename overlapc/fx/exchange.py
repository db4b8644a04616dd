"""Reductions as an exchange and a sum: each rank gets all contributions to its part, and adds them up itself.

    r = wait(reduce_scatter(cast(g), "avg"))
 -> p = wait(all_to_all(g)); r = (cast(p[0]) + cast(p[1]) + ...) / ranks

A ring adds on the way, so it has to carry the dtype that it adds in. Here gradients travel as they were computed (half
the bytes for bfloat16), are added in float32 in the order of ranks, and rounded once. The sum is plain ops: one
generated kernel, with whatever reads it. An all-reduce is the same and a gather of the sums:

    r = wait(all_reduce(cast(g), "sum"))
 -> p = wait(all_to_all(flat(g))); s = cast(p[0]) + cast(p[1]) + ...; r = wait(all_gather(s))
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, fx

from overlapc.fx.arguments import argument
from overlapc.fx.writer import Writer

aten, prims, _c10d = torch.ops.aten, torch.ops.prims, torch.ops._c10d_functional

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


def exchange_reductions(graph_module: fx.GraphModule, ranks_of: Callable[[fx.Node], int]) -> int:
    """Rewrites reductions of a canonical graph; how many. `ranks_of`: how many ranks reduce, 0 to leave one alone."""
    graph = graph_module.graph
    count = 0
    for start in list(graph.nodes):
        if start.op == "call_function" and start.target in REDUCTIONS and ranks_of(start) and refusal(start) is None:
            _exchange(start, ranks_of(start))
            count += 1
    if count:
        graph.eliminate_dead_code(_is_impure)
        graph.lint()
        graph_module.recompile()
    return count


def travelling_bytes(start: fx.Node) -> int:
    """What the exchange of a reduction moves: its input, as it was before casts that lost nothing."""
    given: fx.Node = argument(start, 0)
    value: Tensor = given.meta["val"]
    return value.numel() * (_narrowest(given) or value.dtype).itemsize


def refusal(start: fx.Node) -> str | None:
    """Reason why a reduction cannot be an exchange and a sum; None if it can."""
    given = argument(start, 0).meta["val"]
    if argument(start, 1) not in ("sum", "avg"):
        return f"its reduction is {argument(start, 1)!r}"
    if not given.dtype.is_floating_point:
        return f"it adds up {given.dtype}"
    if not all(isinstance(size, int) for size in given.shape):
        return "its size is symbolic"
    if start.target is _c10d.all_reduce.default and not given.is_contiguous():
        return "its result is not contiguous"
    if len(start.users) != 1 or next(iter(start.users)).target is not _c10d.wait_tensor.default:
        return "its wait is in another graph"
    return None


def _is_impure(node: fx.Node) -> bool:
    """What only this rewriting leaves unread may go: casts and moves."""
    return node.op in ("placeholder", "output") or (node.target not in _MOVES and node.target not in _CASTS)


def _exchange(start: fx.Node, ranks: int) -> None:
    (wait,) = start.users
    how, whole = argument(start, 1), start.target is _c10d.all_reduce.default
    group = argument(start, 2 if whole else 3)
    reduced: Tensor = argument(start, 0).meta["val"]
    dtype = reduced.dtype
    write = Writer(start, start)
    given = _as_computed(argument(start, 0), dtype, write)
    if whole:
        given = _in_parts(write, given, ranks)
    elif not given.meta["val"].is_contiguous():
        given = write.call(aten.clone.default, given, memory_format=torch.contiguous_format)
    value: Tensor = given.meta["val"]
    rows = value.shape[0] // ranks
    sent = write.call(_c10d.all_to_all_single.default, given, [rows] * ranks, [rows] * ranks, group)
    write = Writer(wait, start)
    arrived = write.call(_c10d.wait_tensor.default, sent)
    parts = write.call(aten.view.default, arrived, [ranks, rows, *value.shape[1:]])
    adds_in = torch.float64 if dtype == torch.float64 else torch.float32
    total: fx.Node | None = None
    for rank in range(ranks):
        part = _cast(write, write.call(aten.select.int, parts, 0, rank), adds_in)
        total = part if total is None else write.call(aten.add.Tensor, total, part)
    if how == "avg":
        total = write.call(aten.div.Tensor, total, ranks)
    assert total is not None
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


def _in_parts(write: Writer, node: fx.Node, ranks: int) -> fx.Node:
    """`node` as one row of numbers that divides by the ranks, zeros behind it."""
    value: Tensor = node.meta["val"]
    if not value.is_contiguous():
        node = write.call(aten.clone.default, node, memory_format=torch.contiguous_format)
    flat = write.call(aten.view.default, node, [value.numel()])
    missing = -value.numel() % ranks
    return write.call(aten.constant_pad_nd.default, flat, [0, missing]) if missing else flat


def _cast(write: Writer, node: fx.Node, dtype: torch.dtype) -> fx.Node:
    if node.meta["val"].dtype == dtype:
        return node
    return write.call(prims.convert_element_type.default, node, dtype)


def _as_computed(node: fx.Node, dtype: torch.dtype, write: Writer) -> fx.Node:
    """What `node` was before it was cast up to `dtype`, moved as it was; itself if it was not cast."""
    narrow = _narrowest(node)
    return node if narrow is None or narrow == dtype else _moved(node, narrow, write)


def _narrowest(node: fx.Node) -> torch.dtype | None:
    """The dtype that the numbers of `node` had before casts that lost nothing; None where they had several."""
    dtype: torch.dtype = node.meta["val"].dtype
    if node.target in _CASTS and _widens(node):
        return _narrowest(argument(node, 0))
    if node.target not in _MOVES or not _pads_with_zero(node):
        return dtype
    found = {_narrowest(source) for source in node.all_input_nodes}
    return found.pop() if len(found) == 1 else dtype


def _widens(cast: fx.Node) -> bool:
    """Whether a cast keeps every number, layout and device as they are."""
    before, after = argument(cast, 0).meta["val"], cast.meta["val"]
    exact = before.dtype in (torch.bfloat16, torch.float16) and after.dtype in (torch.float32, torch.float64)
    return exact and before.device == after.device and before.shape == after.shape


def _pads_with_zero(node: fx.Node) -> bool:
    return node.target is not aten.constant_pad_nd.default or len(node.args) < 3 or argument(node, 2) == 0


def _moved(node: fx.Node, narrow: torch.dtype, write: Writer) -> fx.Node:
    """`node` as made of what was not yet cast."""
    if node.meta["val"].dtype == narrow:
        return node
    if node.target in _CASTS:
        return _moved(argument(node, 0), narrow, write)
    sources = {source: _moved(source, narrow, write) for source in node.all_input_nodes}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), sources.__getitem__)
    return write.call(node.target, *args, **kwargs)
