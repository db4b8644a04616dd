"""Sizes that are computed from symbolic sizes: kernels get them as symbols, also where a tensor may be empty."""

from __future__ import annotations

from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._sympy.functions import FloorDiv

from overlapc.backend import overlapc
from overlapc.ir.body import Body, Constant, Loop, Store
from overlapc.ir.indexing import loop_symbol
from overlapc.ir.ops import LoweredGraph
from overlapc.lowering.computed_sizes import ComputedSizes
from overlapc.runtime.counters import counted
from tests.codegen.interpreted import triton_on_cpu


def quarters(x: Tensor) -> tuple[Tensor, ...]:
    """Compute with a quarter of the rows, of which there may be none."""
    count = x.shape[0] // 4
    y = (x[:count].sin() * 2).reshape(count, 3, 4)
    z = F.group_norm(torch.cat([y, y], 1), 2)
    return z.transpose(0, 1).exp(), z.sum(0), z.sum((1, 2)), (z + 1).amax(-1)


def halved(x: Tensor) -> tuple[Tensor, ...]:
    """Compute with sizes of which one is computed from the other."""
    y = x.sin()[..., ::2] + 1
    z = (y * 2)[..., ::2].transpose(1, 2).exp()
    return y.sum(1), z, z.flatten(1).softmax(1)


@pytest.mark.parametrize("wrapper", ["python", "fx"])
@pytest.mark.parametrize("function", [quarters, halved])
def test_kernels_are_generated_for_computed_sizes(function: Any, wrapper: str):
    check_generated(function, {"wrapper": wrapper})


@pytest.mark.parametrize("function", [quarters, halved])
def test_triton_kernels_are_generated_for_computed_sizes(function: Any):
    with triton_on_cpu():
        check_generated(function, {})


def check_generated(function: Any, options: dict[str, Any]) -> None:
    """Compare several sizes with eager, for which one compilation and no call of an op is enough."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(function, backend=overlapc, options=options, dynamic=True, fullgraph=True)
    for number in (16, 21, 9, 33, *((3, 2) if function is quarters else ())):
        x = torch.randn((number, 12) if function is quarters else (2, 3, number))
        for found, wanted in zip(step(x), function(x), strict=True):
            torch.testing.assert_close(found, wanted)
            assert found.stride() == wanted.stride()
    assert not counted("fallbacks")


def test_convolutions_with_symbolic_sizes_leave_nothing_to_eager():
    """Each convolution halves the image; the sizes of the third are divisions of divisions."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    layers = [(nn.Conv2d(4, 4, 3, 2, 1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(3)]
    model = nn.Sequential(*(part for layer in layers for part in layer))
    x = torch.randn(2, 4, 24, 24)
    torch.testing.assert_close(torch.compile(model, backend=overlapc, dynamic=True)(x), model(x))
    assert not counted("fallbacks")


def test_a_size_and_its_square_become_one_symbol():
    s = sympy.Symbol("s", integer=True, positive=True)
    graph = LoweredGraph("graph", (), {}, {}, {}, {}, {}, [], (), {"s": 24})
    sizes = ComputedSizes(graph)
    half = FloorDiv(s - 7, 2) + 1
    quarter = FloorDiv(FloorDiv(s - 7, 2), 2) + 3
    sizes.learn((half, quarter))
    rows, row = loop_symbol("p", 0), loop_symbol("p", 1)
    index = sympy.expand(rows * half**2 * quarter + row)
    store = Store("out", index, Constant(1.0, torch.float32), torch.float32)
    body = sizes.in_symbols(Body((Loop(rows, quarter), Loop(row, sympy.expand(half**2))), (), (store,)))
    first, second = (sympy.Symbol(f"extent{at}", integer=True, nonnegative=True) for at in range(2))
    assert [loop.size for loop in body.loops] == [second, first**2]
    assert body.stores[0].index == rows * first**2 * second + row
    assert graph.computed == {"extent0": half, "extent1": quarter}
    assert graph.size_hints == {"s": 24, "extent0": 9, "extent1": 7}


def test_sizes_that_are_known_only_at_run_time_have_no_symbol():
    u = sympy.Symbol("u0", integer=True, nonnegative=True)
    sizes = ComputedSizes(graph := LoweredGraph("graph", (), {}, {}, {}, {}, {"u0": "item"}, [], (), {}))
    sizes.learn((FloorDiv(u, 2),))
    assert not graph.computed
