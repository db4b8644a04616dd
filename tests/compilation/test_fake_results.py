"""Fake results of graphs, compared with what running the graph on fake tensors returns."""

from __future__ import annotations

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.compilation.fake_results import results_of


def traced(function, *inputs: Tensor) -> fx.GraphModule:
    """Trace a function of a list of results on fake tensors, as AOTAutograd does."""
    return make_fx(function, tracing_mode="fake")(*inputs)


def forms(results) -> list[object]:
    """Return the form of each tensor and the results with which it shares memory."""
    memory = [result.untyped_storage()._cdata for result in results if result is not None]
    return [
        None
        if result is None
        else (
            result.shape, result.stride(), result.storage_offset(), result.dtype, result.device,
            memory.index(result.untyped_storage()._cdata), [result is other for other in results],
        )
        for result in results
    ]  # fmt: skip


def function(x: Tensor, y: Tensor) -> list[Tensor | None]:
    product = (x @ y).to(torch.bfloat16)
    low, high = product.split(2, dim=1)
    return [low, None, high, x.t(), y, product, product, product.sum(dim=0)]


def test_fake_results_are_those_of_the_graph():
    gm = traced(function, torch.randn(3, 5), torch.randn(5, 4))
    results = results_of(gm)
    assert results is not gm.forward
    with FakeTensorMode() as mode:
        x, y = torch.empty(3, 5), torch.empty(5, 4)
        expected, found = gm.forward(x, y), results(x, y)
        assert forms(found) == forms(expected)
        assert found[4] is y
        assert found[3].untyped_storage()._cdata == x.untyped_storage()._cdata
        assert all(result is None or result.fake_mode is mode for result in found)


def test_real_arguments_get_computed_results():
    gm = traced(function, torch.randn(3, 5), torch.randn(5, 4))
    x, y = torch.randn(3, 5), torch.randn(5, 4)
    for expected, found in zip(function(x, y), results_of(gm)(x, y), strict=True):
        torch.testing.assert_close(found, expected)


def test_a_graph_that_changes_memory_runs():
    gm = traced(lambda x: [x.add_(1), x + 1], torch.randn(3))
    assert results_of(gm) == gm.forward


def test_a_graph_with_symbolic_sizes_runs():
    gm = make_fx(lambda x: [x + 1], tracing_mode="symbolic")(torch.randn(3, 5))
    assert results_of(gm) == gm.forward
