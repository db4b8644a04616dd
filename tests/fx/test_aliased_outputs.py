"""Results that are views of one another are removed from the graph and made again from its results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.fx import GraphModule

from overlapc.fx.captured.aliased_outputs import views_outside
from tests.worlds import fake_world


def captured(function: Callable[..., Any], *inputs: Any, dynamic: bool = False) -> tuple[GraphModule, list[Any]]:
    """Return the graph that Dynamo captures of `function`, and the inputs that Dynamo passes to it."""
    found: list[tuple[GraphModule, list[Any]]] = []

    def keep(gm: GraphModule, examples: list[Any]) -> GraphModule:
        found.append((gm, [int(each) if isinstance(each, torch.SymInt) else each for each in examples]))
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=keep, fullgraph=True, dynamic=dynamic)(*inputs)
    ((gm, examples),) = found
    return gm, examples


def a_tensor_and_its_views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    made = torch.nn.functional.linear(x, w)  # for three dims itself a view, of a product that is not returned
    return made, made.view(-1, w.shape[0]), made.transpose(0, 1)[1:], made.mean()


def views_alone(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    made = (x @ w.t()).sin()
    return made[:, 0], made.flatten(1)[1:], made.mean()


def numbers() -> list[Tensor]:
    return [torch.randn(3, 4, 5), torch.randn(6, 5, requires_grad=True)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [a_tensor_and_its_views, views_alone])
def test_a_graph_returns_one_tensor_per_storage_and_its_views_are_made_again(function, dynamic: bool):
    inputs = numbers()
    want = function(*inputs)
    gm, given = captured(function, *inputs, dynamic=dynamic)
    back = views_outside(gm)
    assert back is not None
    returned = [value for value in gm(*given) if isinstance(value, Tensor)]
    assert len({value.untyped_storage().data_ptr() for value in returned}) == len(returned)

    results = back(gm(*given))
    torch.testing.assert_close(tuple(results), want)
    assert [value.stride() for value in results] == [value.stride() for value in want]
    assert len({value.untyped_storage().data_ptr() for value in results}) == 2, "views share memory again"
    gradients = [torch.autograd.grad(sum(each.sin().sum() for each in made), inputs[1]) for made in (results, want)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("function", [a_tensor_and_its_views, views_alone])
def test_dtensors_that_are_views_of_each_other_equal_eager(function, fresh_dynamo: None):
    def of(compute: Callable[..., Any]) -> tuple[list[DTensor], Tensor]:
        results = compute(x, w)
        (gradient,) = torch.autograd.grad(sum(each.sin().sum().full_tensor() for each in results), w)
        return list(results), gradient.full_tensor()

    with fake_world(1):
        mesh = init_device_mesh("cpu", (1,))
        x, w = (
            DTensor.from_local(each.detach(), mesh, [placement])
            for each, placement in zip(numbers(), (Replicate(), Shard(0)), strict=True)
        )
        w.requires_grad_()
        (results, gradient), (wanted, wanted_gradient) = of(torch.compile(function, backend="overlapc")), of(function)
        torch.testing.assert_close(gradient, wanted_gradient)
        for result, want in zip(results, wanted, strict=True):
            torch.testing.assert_close(result.full_tensor(), want.full_tensor())
        for group in (results, wanted):
            assert len({each.to_local().untyped_storage().data_ptr() for each in group}) == 2


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: (x @ w.t(), w.sum()),  # nothing shared
        lambda x, w: (w.view(-1), w.t(), x.sum()),  # views of an input, which AOTAutograd handles
        lambda x, w: ((made := x @ w.t()), made.detach()),  # one result is not differentiable
        lambda x, w: ((made := x @ w.t()).view(-1), made.add_(1)),  # the same memory, but not a view
    ],
)
def test_graphs_without_such_views_are_unchanged(function):
    gm, _ = captured(function, *numbers())
    before = gm.code
    assert views_outside(gm) is None
    assert gm.code == before


@pytest.mark.parametrize("transform", [torch.func.hessian, torch.func.jacfwd, torch.func.jacrev, torch.func.grad])
def test_results_of_torch_func_transforms_equal_eager(transform: Callable[..., Any]) -> None:
    def function(x: Tensor) -> tuple[Tensor, ...]:
        made = transform(lambda p: (p**3).sum())(x.flatten()[:4])
        y = made * 2
        y.add_(1)
        return made * 1, y

    x = torch.arange(6.0)
    torch._dynamo.reset()
    for got, wanted in zip(torch.compile(function, backend="overlapc")(x), function(x), strict=True):
        torch.testing.assert_close(got, wanted)
