"""The generated kernel of flex attention: compared with float64 in the interpreter, and compiled for sm_90."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as flex

import overlapc
from overlapc.codegen.triton import attention
from overlapc.fusion.work import work_of
from overlapc.ir.body import Body, Index, Loop, Store, op
from overlapc.ir.indexing import loop_symbol
from overlapc.ir.ops import SCORE, Attention, BlockLists, Layout, LoweredGraph, View
from overlapc.lowering.flex_attention import kept_share
from overlapc.runtime.counters import counted
from tests.codegen.cubins import compile_source
from tests.codegen.flex_cases import CASES, FlexCase, check, errors
from tests.codegen.interpreted import triton_on_cpu

LENGTH, BLOCK, WIDTH = 48, 16, 16
EACH = [pytest.param(case, dtype, id=f"{case.name}, {dtype}") for case in CASES for dtype in case.dtypes[:1]]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(flex, "_validate_device", lambda *tensors: None)  # it refuses gradients on CPUs
    with triton_on_cpu():
        yield


def compiled(function: Callable[..., Any], dynamic: bool = False) -> Callable[..., Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    return torch.compile(function, backend="overlapc", fullgraph=True, dynamic=dynamic)


def fallbacks() -> tuple[int, int]:
    return counted("fallback flex_attention"), counted("fallback flex_attention_backward")


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize(("case", "dtype"), EACH)
def test_forward_and_backward_are_as_exact_as_eager(case: FlexCase, dtype: torch.dtype):
    check(case, errors(case, compiled, "cpu", dtype, LENGTH, WIDTH, BLOCK), dtype)
    assert fallbacks() == (0, 0)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("why", ["has a gradient", "known only at run time"])
def test_attention_without_a_kernel_calls_torch_and_the_report_says_why(why: str):
    q, k, v = (torch.randn(1, 2, 32, 16, requires_grad=True) for _ in range(3))
    bias = torch.randn(2, requires_grad=why == "has a gradient")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex.flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + bias[h] * (i - j))

    wanted = torch.autograd.grad(call(q, k, v).sum(), q)[0]  # type: ignore[union-attr]
    result = compiled(call, dynamic=why != "has a gradient")(q, k, v)
    torch.testing.assert_close(torch.autograd.grad(result.sum(), q)[0], wanted, rtol=1e-4, atol=1e-5)
    assert fallbacks() == ((0, 1) if why == "has a gradient" else (1, 1))
    (line,) = overlapc.report().steps[-1].graphs[-1].attention
    assert line.startswith("flex attention backward of ")
    assert "computes and stores every score" in line
    assert why in line


def attention_of(
    shape: tuple[int, int, int, int], backward: bool = False, dtype: torch.dtype = torch.bfloat16
) -> Attention:
    """Return causal attention with a score function, in blocks of 128."""
    device = torch.device("cuda", 0)
    batch, heads, length, _ = shape

    def view(name: str, size: tuple[int, ...], dtype: torch.dtype = dtype) -> View:
        form = torch.empty(size, device="meta")
        return View(name, Layout(device, dtype, *(tuple(map(sympy.Integer, each)) for each in (size, form.stride()))))

    blocks = length // 128
    kinds = ("keys", "full_keys", *(("queries", "full_queries") if backward else ()))
    sizes = ((1, 1, blocks), (1, 1, blocks, blocks))
    lists = {kind: tuple(view(f"{kind}{len(size)}", size, torch.int32) for size in sizes) for kind in kinds}
    loops = tuple(Loop(loop_symbol("p", at), sympy.Integer(n)) for at, n in enumerate((batch, heads, length, length)))
    counts = op("ge", *(Index(loop.symbol, torch.int32) for loop in loops[2:]))
    whole, rows = ("query", "key", "value"), ("logsumexp", "maximum")
    results = ("out", *rows)
    if backward:
        whole, results = (*whole, "out", "grad_out"), ("grad_query", "grad_key", "grad_value")
    made = {name: view(name, shape[:3], torch.float32) if name in rows else view(name, shape) for name in results}
    tensors = {name: view(name, shape) for name in whole}
    if backward:
        tensors["logsumexp"] = view("logsumexp", shape[:3], torch.float32)
    double = Body(loops, (), (Store("score", sympy.S.Zero, op("add", SCORE, SCORE), torch.float32),))
    mask = Body(loops, (), (Store("mask", sympy.S.Zero, counts, torch.bool),))
    kept = kept_share(counts, loops, 128, 128)
    return Attention(
        "flex", device, tensors, made, BlockLists(128, 128, lists), 0.125, double, mask, double if backward else None,
        (), kept,
    )  # fmt: skip


@pytest.mark.parametrize("backward", [False, True])
def test_attention_compiles_for_sm_90_and_uses_tensor_cores(backward: bool, tmp_path: Path):
    kernel = attention.source(attention_of((2, 4, 1024, 64), backward), "flex", "")
    stages = compile_source(kernel, tmp_path)
    assert len(stages) == (3 if backward else 1)
    for compiled_stage in stages[1:] if backward else stages:
        assert "wgmma.mma_async" in compiled_stage.asm["ptx"]
        assert "cp.async" in compiled_stage.asm["ptx"]  # the next tiles are loaded asynchronously


def test_work_counts_the_blocks_that_a_mask_keeps():
    graph = LoweredGraph("graph", (), {}, {}, {}, {}, {}, [], (), {})
    forward, backward = (attention_of((2, 4, 1024, 64), each) for each in (False, True))
    assert forward.kept == 36 / 64
    scores = 2 * 4 * 1024 * 1024
    assert work_of(forward, graph).flops == 36 / 64 * scores * 4 * 64
    assert work_of(backward, graph).flops == 36 / 64 * scores * 10 * 64
    unknown = dataclasses.replace(forward, kept=None)
    assert work_of(unknown, graph).flops == scores * 4 * 64


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"dtype": torch.float64}, "attention of torch.float64"),
        ({"shape": (1, 2, 256, 512)}, "heads of 512 elements"),
        ({"blocks": BlockLists(24, 128, {})}, "blocks of 24"),
    ],
)
def test_unsupported_attention_is_refused_with_a_reason(changed: dict[str, Any], why: str):
    made = attention_of(changed.get("shape", (1, 2, 256, 64)), dtype=changed.get("dtype", torch.bfloat16))
    assert attention.refuse(made) is None or "blocks" not in changed
    assert attention.refuse(dataclasses.replace(made, blocks=changed.get("blocks", made.blocks))) == why
