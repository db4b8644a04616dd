"""Equal nodes are merged where that cannot change a result."""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.fx.partitioning.duplicates import merge_duplicates

aten = torch.ops.aten


def traced(function: Callable[..., object], *inputs: Tensor) -> GraphModule:
    return make_fx(function, tracing_mode="fake")(*inputs)


def targets(gm: GraphModule) -> list[object]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def merged(function: Callable[..., object], *inputs: Tensor) -> tuple[int, list[object]]:
    """Return the number of nodes removed and the remaining targets, and assert that the graph computes the same."""
    gm = traced(function, *inputs)
    expected = gm(*(each.clone() for each in inputs))
    count = merge_duplicates(gm.graph)
    gm.graph.lint()
    gm.recompile()
    torch.testing.assert_close(gm(*(each.clone() for each in inputs)), expected, rtol=0, atol=0)
    return count, targets(gm)


def test_chains_of_equal_nodes_are_merged_in_one_pass():
    def twice(x: Tensor) -> Tensor:
        return (x.view(4).exp() * 2).sum() + (x.view(4).exp() * 2).amax()

    count, left = merged(twice, torch.randn(2, 2))
    assert count == 3
    assert left.count(aten.exp.default) == left.count(aten.mul.Tensor) == left.count(aten.view.default) == 1


def test_nodes_whose_arguments_differ_in_type_or_sign_are_not_merged():
    def different(x: Tensor) -> Tensor:
        return aten.mul(x, 1) + aten.mul(x, 1.0) + aten.mul(x, True) + aten.mul(x, 0.0) + aten.mul(x, -0.0)

    count, left = merged(different, torch.randn(3))
    assert count == 0
    assert left.count(aten.mul.Tensor) == 5


def test_results_of_the_graph_are_not_merged():
    def both(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x.exp(), x.exp(), x.exp().sum()

    count, left = merged(both, torch.randn(3))
    assert count == 0
    assert left.count(aten.exp.default) == 3


def test_one_of_several_results_of_a_node_that_is_returned_keeps_the_node_apart():
    count, left = merged(lambda x: (x.sort().values, x.sort().values), torch.randn(3))
    assert count == 0
    assert left.count(aten.sort.default) == 2


def test_collectives_whose_results_are_returned_are_not_merged(world):
    c10d = torch.ops._c10d_functional

    def reduced(x: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_reduce(x, "sum", world))

    gm = traced(lambda x: (reduced(x), reduced(x)), torch.randn(3))
    assert merge_duplicates(gm.graph) == 0


def test_random_nodes_are_not_merged():
    gm = traced(lambda x: aten.rand_like(x) - aten.rand_like(x), torch.randn(3))
    assert merge_duplicates(gm.graph) == 0


def test_nodes_before_and_after_an_update_in_place_are_not_merged():
    def around(x: Tensor, y: Tensor) -> Tensor:
        before = x.exp()
        x.copy_(y)
        return before - x.exp() + x.exp()

    count, left = merged(around, torch.randn(3), torch.randn(3))
    assert count == 1  # of the two after the change
    assert left.count(aten.exp.default) == 2


def test_equal_parts_of_equal_results_are_merged():
    def split(x: Tensor) -> Tensor:
        return torch.split(x, 2)[0].sum() + torch.split(x, 2)[0].amax()

    _, left = merged(split, torch.randn(4))
    assert left.count(operator.getitem) == 2  # the first part, and the second, which is traced but not read
    assert left.count(aten.split.Tensor) == 1
