"""Inputs whose storage offsets differ from those that a step was compiled for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from overlapc.runtime.counters import counted
from tests.worlds import fake_world

EAGERLY = "calls_run_eagerly"

pytestmark = pytest.mark.usefixtures("fresh_dynamo")


@pytest.fixture(autouse=True)
def fresh_counters() -> None:
    torch._dynamo.utils.counters.clear()


def gradients(function: Callable[..., Tensor], memory: Tensor, begin: int) -> tuple[Tensor, ...]:
    x, w = memory[begin : begin + 8].requires_grad_(), torch.arange(3.0).requires_grad_()
    return torch.autograd.grad(function(x, w).sum(), (x, w))


@pytest.mark.parametrize("how", ["plain", "named", "nested"])
def test_a_gradient_through_as_strided_is_right_at_another_offset(how: str) -> None:
    def strided(x: Tensor, w: Tensor) -> Tensor:
        return torch.as_strided(x, (2, 3), (3, 1), 4).sin() * w

    def checkpointed(x: Tensor, w: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(strided, x, w, use_reentrant=False)

    def named(x: Tensor, w: Tensor) -> Tensor:
        return torch.as_strided(input=x, size=(2, 3), stride=(3, 1), storage_offset=4).sin() * w

    function = {"plain": strided, "named": named, "nested": checkpointed}[how]
    compiled = torch.compile(function, backend="overlapc", dynamic=False)
    memory = torch.randn(40)
    torch.testing.assert_close(gradients(compiled, memory, 2), gradients(function, memory, 2))
    assert not counted(EAGERLY)
    with pytest.warns(UserWarning, match="compiled for an input with storage offset 2, and"):
        found = gradients(compiled, memory, 0)
    torch.testing.assert_close(found, gradients(function, memory, 0))
    assert counted(EAGERLY) == 1


def test_inputs_that_share_memory_and_change_are_right_at_other_offsets() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        y.add_(1)
        return x + y

    def called(function: Callable[..., Tensor], first: int, second: int) -> tuple[Tensor, Tensor]:
        memory = torch.arange(40.0)
        return function(memory[first : first + 6], memory[second : second + 6]), memory

    compiled = torch.compile(function, backend="overlapc", dynamic=False)
    torch.testing.assert_close(called(compiled, 0, 2), called(function, 0, 2))
    with pytest.warns(UserWarning, match="runs a call eagerly"):
        torch.testing.assert_close(called(compiled, 5, 7), called(function, 5, 7))
    torch.testing.assert_close(called(compiled, 0, 3), called(function, 0, 3))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("views", [True, False])
def test_inputs_that_share_memory_and_change_are_right_in_memory_of_other_sizes(views: bool, dynamic: bool) -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        x.mul_(2)
        return y + 1

    def called(function: Callable[..., Tensor], *size: int) -> tuple[Tensor, Tensor]:
        memory = torch.arange(40.0)[: size[0] * size[-1]].clone().view(size)
        parts = memory[..., :3], memory[..., 1:4]
        parts = parts if views else tuple(torch.empty(0).set_(each) for each in parts)  # none known to autograd as view
        return function(*parts), memory

    compiled = torch.compile(function, backend="overlapc", dynamic=dynamic)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for size in ((2, 5), (2, 5), (5, 4), (5, 8), (2, 20)):
            torch.testing.assert_close(called(compiled, *size), called(function, *size))


def test_unchanged_inputs_may_have_any_offset() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        return x * y + x.as_strided((2,), (1,), 0).sum()

    compiled = torch.compile(function, backend="overlapc", dynamic=False)
    memory = torch.randn(40)
    for begin in (0, 3, 17):
        given = memory[begin : begin + 6], memory[begin + 1 : begin + 7]
        torch.testing.assert_close(compiled(*given), function(*given))
    assert not counted(EAGERLY)


def test_an_unchanged_leaf_in_the_middle_of_memory_is_compiled_beside_as_strided_of_any_input() -> None:
    """torch sets the memory of such a leaf's example, which then has another version, as one that the graph changes."""

    def strided(x: Tensor) -> Tensor:
        return x.as_strided((2, 3), (3, 1), 0).sin()

    def function(x: Tensor, y: Tensor) -> Tensor:
        return torch.utils.checkpoint.checkpoint(strided, x, use_reentrant=False) * y.sum()

    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(40)[7:].detach().requires_grad_()
    found = torch.autograd.grad(torch.compile(function, backend="overlapc")(x, y).sum(), (x, y))
    torch.testing.assert_close(found, torch.autograd.grad(function(x, y).sum(), (x, y)))
    assert not counted(EAGERLY)


def test_as_strided_counts_from_the_start_of_a_changed_inputs_memory() -> None:
    def function(x: Tensor) -> Tensor:
        strided = torch.as_strided(x, (2, 3), (3, 1), 0)
        x.index_fill_(0, torch.tensor([0]), 2.0)
        return strided + 1

    def called(function: Callable[..., Tensor], begin: int) -> tuple[Tensor, Tensor]:
        memory = torch.arange(40.0)
        return function(memory[begin : begin + 8]), memory

    compiled = torch.compile(function, backend="overlapc", dynamic=False)
    torch.testing.assert_close(called(compiled, 0), called(function, 0))
    assert not counted(EAGERLY)
    with pytest.warns(UserWarning, match="runs a call eagerly"):
        torch.testing.assert_close(called(compiled, 5), called(function, 5))
    torch.compiler.reset()
    with pytest.warns(UserWarning, match="modifies an input whose storage offset is not 0"):
        torch.testing.assert_close(called(compiled, 5), called(function, 5))


def test_changed_inputs_in_one_memory_with_specialized_sizes_run_eagerly() -> None:
    def function(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return x + torch.arange(4.0)

    def called(function: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        memory = torch.arange(4.0)
        return function(memory, memory.data[3]), memory

    compiled = torch.compile(function, backend="overlapc", dynamic=True)
    with pytest.warns(UserWarning, match="torch cannot trace their sizes"):
        torch.testing.assert_close(called(compiled), called(function))


def test_changes_of_a_detached_part_of_another_input_run_eagerly() -> None:
    """AOTAutograd refuses them: autograd does not record the detached part as a view of the other input."""

    def function(x: Tensor, part: Tensor) -> Tensor:
        part.add_(1)
        return x * part

    def gradient(function: Callable[..., Tensor]) -> Tensor:
        leaf = torch.linspace(0, 1, 5).requires_grad_()
        x = leaf * 1
        return torch.autograd.grad(function(x[1:4], x.detach()[1:4]).sum(), leaf)[0]

    compiled = torch.compile(function, backend="overlapc")
    with pytest.warns(UserWarning, match="autograd does not record either as a view"):
        torch.testing.assert_close(gradient(compiled), gradient(function))


@pytest.fixture
def weight() -> Iterator[DTensor]:
    with fake_world(1):
        yield distribute_tensor(torch.arange(3.0), init_device_mesh("cpu", (1,)), [Replicate()]).requires_grad_()


def test_a_gradient_through_as_strided_beside_a_dtensor_is_right_at_another_offset(weight: DTensor) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.as_strided(x, (2, 3), (3, 1), 4).sin() * weight.to_local() * w

    compiled = torch.compile(function, backend="overlapc", dynamic=False)
    memory = torch.randn(40)
    torch.testing.assert_close(gradients(compiled, memory, 2), gradients(function, memory, 2))
    assert not counted(EAGERLY)
    with pytest.warns(UserWarning, match="compiled for an input with storage offset 2, and"):
        torch.testing.assert_close(gradients(compiled, memory, 0), gradients(function, memory, 0))


def test_changes_of_inputs_that_share_memory_run_eagerly_beside_a_dtensor(weight: DTensor) -> None:
    """AOTAutograd refuses them."""

    def called(function: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        memory = torch.arange(10.0)
        return function(memory[:6], memory[2:8]), memory

    def function(x: Tensor, y: Tensor) -> Tensor:
        y.add_(1)
        return (x * weight.to_local().sum()).sum()

    compiled = torch.compile(function, backend="overlapc")
    with pytest.warns(UserWarning, match="cannot trace in a graph that also takes or returns DTensors"):
        torch.testing.assert_close(called(compiled), called(function))
