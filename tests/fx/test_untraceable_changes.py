"""Graphs whose changes torch traces wrongly run eagerly, with one warning; those that look alike do not."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from overlapc.runtime.counters import counted

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


def with_setitem(x: Tensor) -> None:
    x.unfold(0, 2, 3)[0] = 5


def with_out(x: Tensor) -> None:
    torch.add(x[:8].view(4, 2), 1, out=x.unfold(0, 2, 2))


def in_a_checkpoint(x: Tensor) -> None:
    checkpoint(lambda y: y.unfold(0, 2, 2).mul_(3), x, use_reentrant=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.unfold(0, 2, 2).add_(1),
        lambda x: x.unfold(0, 2, 3).select(1, 0)[1:].sin_(),
        lambda x: F.relu(x.unfold(0, 2, 3), True),
        with_setitem,
        with_out,
        in_a_checkpoint,
    ],
)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_elements_that_unfold_leaves_out_stay(change: Callable[[Tensor], object], dynamic: bool) -> None:
    def function(x: Tensor) -> Tensor:
        y = x - 3
        change(y)
        return y * 2

    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(function, backend="overlapc", dynamic=dynamic)
    with pytest.warns(UserWarning, match=r"modifies memory through unfold.*test_untraceable_changes.py"):
        found = compiled(torch.arange(9.0))
    assert torch.equal(found, function(torch.arange(9.0)))
    assert counted("calls_run_eagerly") == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[1:].as_strided((2, 2), (3, 1)).add_(1),
        lambda x: x.view(3, 3).t().as_strided((2, 2), (3, 1))[0].mul_(2),
        lambda x: torch.as_strided(x.detach(), (3,), (2,)).zero_(),
        lambda x: x.as_strided((4, 2), (2, 1)).as_strided((2,), (3,), 1).sin_(),
    ],
)
@pytest.mark.parametrize("of_an_input", [False, True], ids=["of a result", "of an input"])
def test_changes_through_as_strided_of_views_are_made(change: Callable[[Tensor], object], of_an_input: bool) -> None:
    def function(x: Tensor) -> Tensor:
        y = x if of_an_input else x - 3
        change(y)
        return y * 2

    given = [torch.arange(9.0) for _ in range(2)]
    with pytest.warns(UserWarning, match=r"modifies memory through as_strided of a view.*test_untraceable_changes.py"):
        found = torch.compile(function, backend="overlapc")(given[0])
    assert torch.equal(found, function(given[1]))
    assert torch.equal(*given)


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.as_strided((2, 2), (3, 1))[0].add_(1),
        lambda x: x.add_(1).as_strided((2, 2), (3, 1)).mul_(2),
        lambda x: x.contiguous().as_strided((2,), (4,)).sin_(),
        lambda x: (x[1:].as_strided((2, 2), (3, 1)), x[1:].cos_())[0].exp(),
    ],
)
def test_changes_through_as_strided_of_whole_tensors_are_compiled(change: Callable[[Tensor], object]) -> None:
    def function(x: Tensor) -> Tensor:
        y = x - 3
        change(y)
        return y * 2

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="overlapc runs a graph eagerly")
        found = torch.compile(function, backend="overlapc", dynamic=False)(torch.arange(9.0))
    torch.testing.assert_close(found, function(torch.arange(9.0)))


def test_reads_through_unfold_are_compiled() -> None:
    def function(x: Tensor) -> Tensor:
        parts = x.unfold(0, 2, 3) + torch.func.grad(lambda y: y.unfold(0, 2, 3).sin().sum())(x)[:2]
        y = parts.clone()
        y[0] = 1
        x.add_(1)
        return parts.exp() + y.mul_(2) + F.relu(parts)

    compiled = torch.compile(function, backend="overlapc", dynamic=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="overlapc runs a graph eagerly")
        torch.testing.assert_close(compiled(torch.arange(9.0)), function(torch.arange(9.0)))


def test_changes_of_the_new_memory_that_the_function_unfold_returns_are_compiled() -> None:
    def function(x: Tensor) -> Tensor:
        return F.unfold(x, 2).mul_(2)

    x = torch.randn(1, 2, 4, 4)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="overlapc runs a graph eagerly")
        assert torch.equal(torch.compile(function, backend="overlapc", dynamic=False)(x), function(x))


@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_float64_tensor_without_dims_is_changed(requires_grad: bool) -> None:
    def function(x: Tensor) -> Tensor:
        x.mul_(2)
        return x + 3

    compiled = torch.compile(function, backend="overlapc")
    given = [torch.tensor(5.0, dtype=torch.float64, requires_grad=requires_grad) * 1 for _ in range(2)]
    with pytest.warns(UserWarning, match="modifies an input that is a 0-dim float64 tensor"):
        found = compiled(given[0])
    assert (found.item(), given[0].item()) == (function(given[1]).item(), given[1].item()) == (13, 10)
