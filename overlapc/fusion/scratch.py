"""Memory that a library call allocates and frees within itself.

Only backward of attention on GPUs needs much of it in training: a gradient of the queries in float32, to which the
kernel adds the parts of all keys, and copies of what it cannot read as it is. The sizes are those that torch 2.11
allocates on an H200 (`tests/multigpu/test_scratch.py` measures them); they follow from
aten/src/ATen/native/transformers/cuda/attention_backward.cu and, for cuDNN, from measurements. Not included is what
other calls allocate, such as workspaces of convolutions and of sorts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from overlapc.ir.ops import Extern, LoweredGraph, View

aten = torch.ops.aten
_FLOAT32 = torch.float32.itemsize


def scratch_bytes(call: Extern, graph: LoweredGraph) -> int:
    """Return the bytes that `call` allocates and frees within itself at the traced sizes; 0 if they are not known."""
    rule = _RULES.get(call.target)
    if rule is None or call.args[0].layout.device.type != "cuda":
        return 0
    return rule(call, graph)


def _sizes(call: Extern, graph: LoweredGraph) -> tuple[int, int, int, int, int, int]:
    """Return batch, heads of queries, heads of keys, queries, keys and elements of a head of attention's backward."""
    batch, heads, queries, width = (graph.hint(size) for size in call.args[1].size)
    _, key_heads, keys, _ = (graph.hint(size) for size in call.args[2].size)
    return batch, heads, key_heads, queries, keys, width


def _cudnn(call: Extern, graph: LoweredGraph) -> int:
    batch, heads, key_heads, queries, keys, width = _sizes(call, graph)
    sums = batch * heads * queries * (width + 1) * _FLOAT32
    return sums + _of_every_head(call, batch, heads, key_heads, keys, width)


def _flash(call: Extern, graph: LoweredGraph) -> int:
    batch, heads, key_heads, queries, keys, width = _sizes(call, graph)
    rows = batch * heads * _multiple(queries, 128)
    sums = rows * (_splits(call, batch * heads) * _multiple(width, 32 if width <= 128 else 64) + 1) * _FLOAT32
    copies = sum(_copy_bytes(view, graph) for view in (call.args[0], call.args[4]))  # gradient and result
    return sums + copies + _of_every_head(call, batch, heads, key_heads, keys, width)


def _efficient(call: Extern, graph: LoweredGraph) -> int:
    batch, heads, _, queries, _, width = _sizes(call, graph)
    copies = _copy_bytes(call.args[0], graph)
    rows = batch * heads * queries
    if call.args[1].dtype == torch.float32:  # products of gradient and result, and twice their sums
        return copies + rows * (width + 2) * _FLOAT32
    padded = batch * heads * _multiple(queries, 128) * _multiple(width, 64 if width <= 64 else 128)
    return copies + (padded + rows) * _FLOAT32


def _of_every_head(call: Extern, batch: int, heads: int, key_heads: int, keys: int, width: int) -> int:
    """Return the bytes of the gradients of keys and values for each head of queries, before those of a group of heads
    are added up; 0 if every head has keys of its own."""
    if heads == key_heads:
        return 0
    return int(2 * batch * heads * keys * width * call.args[1].dtype.itemsize)


def _splits(call: Extern, blocks: int) -> int:
    """Return the number of partial sums that flash attention keeps of a gradient; one without determinism, where they
    are added atomically."""
    if not torch.are_deterministic_algorithms_enabled() or not torch.cuda.is_available():
        return 1
    return -(-torch.cuda.get_device_properties(call.args[0].layout.device).multi_processor_count // blocks)


def _copy_bytes(view: View, graph: LoweredGraph) -> int:
    """Return the bytes of a copy of `view`, [batch, heads, rows, width], if its memory is not in the order [batch,
    rows, heads, width]; else 0."""
    batch, heads, rows, width = (graph.hint(size) for size in view.size)
    expected = (rows * heads * width, width, heads * width, 1)
    strides = tuple(graph.hint(stride) for stride in view.layout.stride)
    pairs = zip((batch, heads, rows, width), strides, expected, strict=True)
    in_order = all(size == 1 or stride == wanted for size, stride, wanted in pairs)
    return 0 if in_order else batch * heads * rows * width * view.dtype.itemsize


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of


_RULES: dict[Any, Callable[[Extern, LoweredGraph], int]] = {
    aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn,
    aten._scaled_dot_product_flash_attention_backward.default: _flash,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient,
}
