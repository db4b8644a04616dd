"""Memory within a library call, by formulas: compared with what torch allocated on an H200.

`tests/multigpu/test_scratch.py` measures these sizes.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from overlapc.fusion.scratch import scratch_bytes
from overlapc.fusion.to_schedule import to_schedule
from overlapc.ir.ops import Extern, View
from overlapc.schedule.memory import analyze
from tests.fusion.small_graphs import graph, view

aten = torch.ops.aten
BACKWARD: dict[str, Any] = {
    "cudnn": aten._scaled_dot_product_cudnn_attention_backward.default,
    "flash": aten._scaled_dot_product_flash_attention_backward.default,
    "efficient": aten._scaled_dot_product_efficient_attention_backward.default,
}
# Kernel, dtype, (batch, heads, heads of keys, queries, keys, width), bytes that torch 2.11 allocated on an H200.
# Gradient and result lie in the order [batch, heads, rows, width], except for the result of "efficient".
MEASURED: list[tuple[str, torch.dtype, tuple[int, ...], int]] = [
    ("cudnn", torch.bfloat16, (2, 8, 8, 1024, 1024, 64), 4_260_352),
    ("cudnn", torch.bfloat16, (2, 8, 2, 1024, 1024, 128), 16_843_264),
    ("cudnn", torch.bfloat16, (1, 4, 4, 200, 200, 80), 259_584),
    ("cudnn", torch.bfloat16, (2, 8, 8, 512, 1536, 64), 2_130_432),
    ("flash", torch.bfloat16, (2, 8, 8, 1024, 1024, 64), 8_454_144),
    ("flash", torch.bfloat16, (2, 8, 2, 1024, 1024, 128), 25_231_360),
    ("flash", torch.bfloat16, (1, 4, 4, 200, 200, 80), 653_312),
    ("flash", torch.bfloat16, (2, 8, 8, 1000, 1000, 96), 12_500_992),
    ("efficient", torch.bfloat16, (2, 8, 8, 1024, 1024, 64), 6_361_088),
    ("efficient", torch.bfloat16, (2, 8, 8, 1000, 1000, 96), 11_526_656),
    ("efficient", torch.float32, (2, 8, 8, 1024, 1024, 64), 8_519_680),
]
ROUNDING = 6144  # bytes: torch rounds every block up, and kernels have a few counters


def on_gpu(tensor: View) -> View:
    return View(tensor.buffer, replace(tensor.layout, device=torch.device("cuda", 0)))


def in_order_of_rows(tensor: View) -> View:
    """Return `tensor`, [batch, heads, rows, width], with memory in the order [batch, rows, heads, width]."""
    layout = tensor.layout
    _, heads, rows, width = layout.size
    return View(tensor.buffer, replace(layout, stride=(rows * heads * width, width, heads * width, layout.stride[3])))


def backward(kernel: str, dtype: torch.dtype, sizes: tuple[int, ...]) -> Extern:
    batch, heads, key_heads, queries, keys, width = sizes
    query, key = (batch, heads, queries, width), (batch, key_heads, keys, width)
    shapes = {"grad": query, "q": query, "k": key, "v": key, "out": query}
    grad, q, k, v, out = (on_gpu(view(name, *shape, dtype=dtype)) for name, shape in shapes.items())
    args = (grad, q, k, v, None, in_order_of_rows(out)) if kernel == "efficient" else (grad, q, k, v, out)
    results = [on_gpu(view(f"d{name}", *shape, dtype=dtype)) for name, shape in (("q", query), ("k", key), ("v", key))]
    return Extern("bwd", BACKWARD[kernel], args, {}, results)


@pytest.mark.parametrize(("kernel", "dtype", "sizes", "measured"), MEASURED)
def test_the_memory_within_backward_of_attention_is_what_was_measured(
    kernel: str, dtype: torch.dtype, sizes: tuple[int, ...], measured: int
) -> None:
    call = backward(kernel, dtype, sizes)
    assert scratch_bytes(call, graph([call], ["dq"])) == pytest.approx(measured, abs=ROUNDING)


def test_a_gradient_in_the_order_of_rows_is_not_copied() -> None:
    call = backward("flash", torch.bfloat16, (2, 8, 8, 1024, 1024, 64))
    grad, *others, out = call.args
    without = replace(call, args=(in_order_of_rows(grad), *others, in_order_of_rows(out)))
    whole = graph([call], ["dq"])
    assert scratch_bytes(call, whole) - scratch_bytes(without, whole) == 2 * 2 * 8 * 1024 * 64 * 2


def test_the_peak_of_a_schedule_counts_it() -> None:
    call = backward("cudnn", torch.bfloat16, (1, 2, 2, 64, 64, 64))
    given = [each for each in call.args if each is not None]
    whole = graph([call], ["dq", "dk", "dv"], [each.buffer for each in given], views=given)
    schedule = to_schedule([call], whole)
    buffers = sum(buffer.bytes for buffer in schedule.buffers.values())
    assert analyze(schedule).peak_bytes == buffers + scratch_bytes(call, whole)
    assert scratch_bytes(call, whole) == 2 * 64 * (64 + 1) * 4


def test_no_other_call_and_no_cpu_has_such_memory() -> None:
    call = backward("cudnn", torch.bfloat16, (1, 2, 2, 64, 64, 64))
    on_cpu = replace(call, args=(view("grad", 1, 2, 64, 64), *call.args[1:]))
    other = replace(call, target=aten.sin.default)
    assert [scratch_bytes(each, graph([call], ["dq"])) for each in (on_cpu, other)] == [0, 0]
