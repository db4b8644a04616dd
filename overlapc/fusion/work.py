"""The work of an op, in FLOPs and bytes, from which estimators predict its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch._higher_order_ops.flex_attention import flex_attention, flex_attention_backward
from torch.utils.flop_counter import flop_registry

from overlapc.fusion.deps import symbols_used
from overlapc.ir.body import Load, Op, Reduce, Scan
from overlapc.ir.ops import Attention, Combo, Extern, IROp, Loops, LoweredGraph, View, inputs_of, loops_of, tree_map
from overlapc.schedule.model import Work

aten = torch.ops.aten
_LONG_ROW = 16384  # elements; longer rows do not stay in registers and are read more than once


def work_of(op: IROp, graph: LoweredGraph) -> Work:
    """Return FLOPs and bytes of one op at the traced sizes; the accessed bytes of each buffer count once."""
    if isinstance(op, Loops | Combo):
        works = [_loops_work(part, graph) for part in loops_of(op)]
        flops, read_bytes, write_bytes = (
            sum(numbers) for numbers in zip(*((w.flops, w.read_bytes, w.write_bytes) for w in works), strict=True)
        )
        return replace(works[0], flops=flops, read_bytes=read_bytes, write_bytes=write_bytes)  # all have one form
    read: dict[str, int] = {}
    for view in inputs_of(op):
        if isinstance(view, View):
            read[view.buffer] = max(read.get(view.buffer, 0), _view_bytes(view, graph))
    written = sum(_view_bytes(view, graph) for view in op.outputs if isinstance(view, View))
    flops, dtype = 0, ""
    if isinstance(op, Attention):
        formula = _attention_backward if op.is_backward else _attention_forward
        tensors = [op.tensors[role] for role in ("query", "key", "value")]
        shapes = [_shape(view, graph) for view in tensors]
        flops = round((1.0 if op.kept is None else op.kept) * formula([()] * op.is_backward + shapes))
        dtype = str(tensors[0].dtype).removeprefix("torch.")
    elif isinstance(op, Extern):
        written += sum(_view_bytes(view, graph) for view in op.mutates)
        flops = extern_flops(op, graph)
        first = next((view for view in inputs_of(op) if isinstance(view, View)), None)
        dtype = str(first.dtype).removeprefix("torch.") if first is not None else ""
    return Work(flops, sum(read.values()), written, dtype)


def _view_bytes(view: View, graph: LoweredGraph) -> int:
    """Return the bytes of distinct elements: an expanded dim (stride 0) is read once."""
    count = 1
    for extent, step in zip(view.layout.size, view.layout.stride, strict=True):
        count *= 1 if step == 0 else graph.hint(extent)
    return count * view.dtype.itemsize


def _loops_work(op: Loops, graph: LoweredGraph) -> Work:
    iterations = graph.hint(op.body.numel() * op.body.reduction_numel())
    read: dict[str, int] = {}
    values = op.body.values()
    for load in values:
        if isinstance(load, Load):
            whole = graph.hint(graph.views[load.buffer].layout.storage_bytes())
            touched = iterations * load.memory_dtype.itemsize
            read[load.buffer] = min(whole, read.get(load.buffer, 0) + touched)
    written = 0
    for store in op.body.stores:
        whole = graph.hint(graph.views[store.buffer].layout.storage_bytes())
        touched = iterations * store.memory_dtype.itemsize
        written += min(whole, touched)
        if store.is_atomic:  # reads the element's old value
            read[store.buffer] = min(whole, touched)
    # One operation per value and iteration: element-wise kernels are memory-bound, so a rough count is enough.
    flops = iterations * sum(isinstance(value, Op | Reduce | Scan) for value in values)
    dtype = "float32"
    if op.body.dots():  # a multiplication and an addition per term; prologue and epilogue do not count
        flops = 2 * iterations
        loaded = [load.memory_dtype for load in op.body.loads()]  # empty for a product of constants
        dtype = str(loaded[0]).removeprefix("torch.") if loaded else dtype
    return Work(flops, sum(read.values()), written, dtype, _form(op, graph))


def _form(op: Loops, graph: LoweredGraph) -> str:
    """Return the kernel's form of memory access; kernels of one form reach similar bandwidth."""
    reduced = {loop.symbol for loop in op.body.reduction}
    if not reduced:
        return ""
    inputs = [load for load in op.body.loads() if not reduced.isdisjoint(load.index.free_symbols)]
    largest = max(inputs, key=lambda load: graph.hint(graph.views[load.buffer].layout.storage_numel()), default=None)
    if largest is not None and all(abs(largest.index.coeff(symbol)) != 1 for symbol in reduced):
        return "columns"
    return "long_rows" if graph.hint(op.body.reduction_numel()) > _LONG_ROW else "rows"


def extern_flops(op: Extern, graph: LoweredGraph) -> int:
    """Return the FLOPs of a library call by torch's formulas, or ours for attention.

    0 if neither knows the op, or if it multiplies matrices whose sizes are known only when it runs.
    """
    own = _ATTENTION.get(op.target)
    if own is not None:
        return own([_shape(view, graph) for view in op.args[: _ATTENTION_TENSORS[op.target]]])
    formula: Callable[..., Any] | None = flop_registry.get(getattr(op.target, "overloadpacket", op.target))
    if formula is None:
        return 0

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, View):
            return graph.hint(leaf) if hasattr(leaf, "free_symbols") else leaf
        size = torch.Size(_shape(leaf, graph))
        # A formula registered with `get_raw` takes tensors; others take shapes, which torch's wrapper extracts.
        return size if hasattr(formula, "__wrapped__") else torch.empty(size, dtype=leaf.dtype, device="meta")

    args, kwargs, result = (tree_map(plain, tree) for tree in (list(op.args), dict(op.kwargs), op.result))
    try:
        return int(formula(*args, **kwargs, out_val=result))
    except AssertionError:
        if all(name in graph.size_hints for name in symbols_used(op)):
            raise
        return 0  # two sizes are equal, but their guesses are not: [6, u0 + u1] @ [8, 6]


def _shape(view: Any, graph: LoweredGraph) -> tuple[int, ...]:
    return tuple(graph.hint(extent) for extent in view.size)


def _attention_forward(shapes: list[tuple[int, ...]]) -> int:
    """Return the FLOPs of two matmuls over [batch, heads, queries, keys]; heads may share keys (grouped queries)."""
    query, key, value = shapes
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[-2] * (width + value[-1])


def _attention_backward(shapes: list[tuple[int, ...]]) -> int:
    """Return the FLOPs of five matmuls: scores again, and the gradients of values, scores, queries and keys."""
    _, query, key, value = shapes[:4]
    batch, heads, rows, width = query
    return 2 * batch * heads * rows * key[-2] * (3 * width + 2 * value[-1])


_FORWARD = [
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
]
_BACKWARD = [
    aten._scaled_dot_product_flash_attention_backward.default,
    aten._scaled_dot_product_efficient_attention_backward.default,
    aten._scaled_dot_product_cudnn_attention_backward.default,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
]
# torch's formulas assert that queries and keys have equally many heads, which grouped-query attention violates.
# Flex attention that is not lowered computes every score, regardless of its block mask.
_ATTENTION: dict[Any, Callable[[list[tuple[int, ...]]], int]] = {
    **dict.fromkeys((*_FORWARD, flex_attention), _attention_forward),
    **dict.fromkeys(_BACKWARD, _attention_backward),
    flex_attention_backward: lambda shapes: _attention_backward([(), *shapes]),
}
_ATTENTION_TENSORS: dict[Any, int] = {
    **dict.fromkeys((*_FORWARD, flex_attention, flex_attention_backward), 3),
    **dict.fromkeys(_BACKWARD, 4),
}
