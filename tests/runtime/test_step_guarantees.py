"""Steps of plain tensors keep the guarantees of AOTAutograd's wrapper without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn import functional as F
from torch.testing._internal.two_tensor import TwoTensor

from overlapc.backend import overlapc as backend
from overlapc.runtime.step import StepPlan
from overlapc.runtime.support import LayoutError
from tests.runtime.beside_torch import OPTIONS, Compile, error_of, leaf, lean_calls, observed

SCENARIOS: list[Any] = []


def scenario(function: Callable[[Compile], Any]) -> Callable[[Compile], Any]:
    SCENARIOS.append(pytest.param(function, id=function.__name__))
    return function


def marks(result: Tensor) -> list[list[int]]:
    """Return the dims of `result` that are marked for Dynamo."""
    return [sorted(each) for each in vars(result).values()]


@pytest.fixture
def lean(monkeypatch: pytest.MonkeyPatch) -> list[StepPlan]:
    """Return a list to which every call without AOTAutograd's wrapper appends its plan."""
    return lean_calls(monkeypatch)


@pytest.mark.parametrize("run", SCENARIOS)
def test_scenarios_give_the_same_as_under_torchs_wrapper(run: Callable[[Compile], Any], lean: list[StepPlan]):
    ours, expected = observed(run, "overlapc"), observed(run, "aot_eager")
    assert lean, "the step ran under torch's wrapper: nothing was tested"
    torch.testing.assert_close(ours, expected)


# --- results


@scenario
def results_may_be_changed_in_place(compile: Compile) -> Any:
    """torch's own `as_strided_scatter` returns a view of its copy."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin(), torch.as_strided_scatter(x, x[:2] * 2, (2,), (1,), 1)

    step, x, seen = compile(function), leaf(4), []
    for _ in range(3):
        _, result = step(x)
        result.mul_(3)
        seen += [result.detach(), *torch.autograd.grad(result.sum(), x)]
    return seen


# --- inputs that change


@scenario
def versions_of_changed_inputs_go_up(compile: Compile) -> Any:
    def function(x: Tensor, weight: Tensor, grad: Tensor) -> Tensor:
        x.add_(1)
        with torch.no_grad():
            weight.sub_(grad)
        return x * 2

    step, x, weight, grad = compile(function), torch.zeros(4), leaf(4), torch.ones(4)
    seen = []
    for _ in range(3):
        before = (x._version, weight._version, grad._version)
        result = step(x, weight, grad)
        after = (x._version, weight._version, grad._version)
        seen.append([now > then for now, then in zip(after, before, strict=True)])
    return seen, result, x, weight.detach(), result.requires_grad


@scenario
def a_change_after_forward_is_seen_by_backward(compile: Compile) -> Any:
    """But forward's own change of an input is not an error in backward."""

    def function(x: Tensor, count: Tensor) -> Tensor:
        count.mul_(2)
        return (x * count).sum()

    step, x, count = compile(function), leaf(4), torch.ones(4)
    seen = []
    for changes in (False, False, True, False):
        loss = step(x, count)
        if changes:
            count.add_(1)
        seen.append(error_of(loss.backward))
    return seen, x.grad, count


@scenario
def inputs_that_are_views_and_change(compile: Compile) -> Any:
    step, base = compile(lambda x: x.mul_(2).sum()), torch.ones(3, 4)
    for _ in range(3):
        step(base[1])
    return base


@scenario
def steps_of_an_optimizer(compile: Compile) -> Any:
    def update(weights: list[Tensor], grads: list[Tensor], means: list[Tensor]) -> None:
        torch._foreach_lerp_(means, grads, 0.1)
        torch._foreach_add_(weights, means, alpha=-0.1)

    step = torch.no_grad()(compile(update))
    weights, grads, means = ([torch.randn(3, 2), torch.randn(5)] for _ in range(3))
    for _ in range(4):
        step(weights, grads, means)
    return weights, means, [each._version > 2 for each in weights]


@scenario
def running_statistics(compile: Compile) -> Any:
    model = nn.BatchNorm1d(4)
    step = compile(model)
    for _ in range(4):
        step(torch.randn(8, 4)).square().sum().backward()
    return dict(model.named_buffers()), [each.grad for each in model.parameters()]


@scenario
def in_inference_mode(compile: Compile) -> Any:
    def function(x: Tensor) -> Tensor:
        x.add_(1)
        return x * 2

    step = compile(function)
    with torch.inference_mode():
        x = torch.ones(4)
        results = [step(x) for _ in range(3)]
    return [each.is_inference() for each in results], [each.clone() for each in results]


# --- gradients


@scenario
def detached_inputs_pass_no_gradient(compile: Compile) -> Any:
    reached: list[bool] = []

    class Upstream(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            reached.append(True)
            return grad

    step = compile(lambda x, y: x.detach() * y)
    seen = []
    for _ in range(3):
        w, y = leaf(4), leaf(4)
        step(Upstream.apply(w), y).sum().backward()
        seen.append((w.grad is None, y.grad, len(reached)))
    return seen


@scenario
def tangents_of_tensor_subclasses(compile: Compile) -> Any:
    step, x = compile(lambda x: x.sin()), leaf(4)
    given = [torch.ones(4), TwoTensor(torch.ones(4), torch.ones(4)), AsyncCollectiveTensor(torch.full((4,), 2.0))]
    seen = []
    for grad in (given[0], *given):
        result = step(x)
        seen.append(error_of(lambda result=result, grad=grad: result.backward(grad)))
    return seen, x.grad


@scenario
def hooks_on_inputs_and_views_of_them(compile: Compile) -> Any:
    step, base = compile(lambda x, y: x * y), leaf(3, 4)
    seen: list[Tensor] = []
    for _ in range(3):
        row = base[1]
        row.register_hook(lambda grad: seen.append(grad) or grad * 2)
        step(row, torch.ones(4)).sum().backward()
    return seen, base.grad


@scenario
def backward_in_deterministic_mode(compile: Compile) -> Any:
    step, x = compile(lambda x: x.sin()), leaf(4)
    seen = []
    for deterministic in (False, False, True):
        result = step(x)
        torch.use_deterministic_algorithms(deterministic)
        try:
            seen.append(error_of(result.sum().backward))
        finally:
            torch.use_deterministic_algorithms(False)
    return seen


@scenario
def graphs_that_are_retained(compile: Compile) -> Any:
    step, x = compile(lambda x: (x.sin() * x).exp()), leaf(4)
    seen = []
    for _ in range(3):
        loss = step(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        seen.append(error_of(loss.backward))
    return seen, x.grad


@scenario
def batched_gradients(compile: Compile) -> Any:
    step, x = compile(lambda x: x.sin()), leaf(4)
    step(x).sum().backward()
    return [torch.autograd.grad(step(x), x, torch.eye(4), is_grads_batched=True) for _ in range(2)]


@scenario
def backward_under_a_transform(compile: Compile) -> Any:
    step, x = compile(lambda x: x.sin()), leaf(4)
    step(x).sum().backward()
    seen = []
    for _ in range(2):
        result = step(x)

        def vjp(grad: Tensor, result: Tensor = result) -> Tensor:
            (found,) = torch.autograd.grad(result, x, grad, retain_graph=True)
            return found

        seen.append(error_of(lambda vjp=vjp: torch.func.vmap(vjp)(torch.eye(4))))
    return seen


# --- outputs


@scenario
def outputs_that_are_views_of_intermediate_values(compile: Compile) -> Any:
    """The user may change such outputs in place, and gradients are still right."""
    step, x, weight = compile(F.linear), leaf(2, 3, 4), leaf(5, 4)
    seen = []
    for _ in range(3):
        result = step(x, weight)
        seen.append((result._is_view(), result.requires_grad))
        result.add_(1).square().sum().backward()
    return seen, x.grad, weight.grad


@scenario
def which_outputs_have_gradients(compile: Compile) -> Any:
    def function(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            constant = x.exp()
        return x * y, constant, x.argmax(), y.cos()

    step = compile(function)
    seen = []
    for _ in range(3):
        results = step(leaf(4), torch.ones(4))
        results[0].sum().backward()
        seen.append([each.requires_grad for each in results])
    return seen


# --- symbolic sizes


@scenario
def sizes_that_change(compile: Compile) -> Any:
    step = compile(lambda x, y: ((x * y).sin(), (x + y).sum(1)), dynamic=True)
    seen = []
    for rows in (3, 4, 7, 5):
        x, y = leaf(rows, 4), leaf(rows, 4)
        first, second = step(x, y)
        # In turn: only the first output has a gradient; both have one, the first in another layout.
        if rows % 2:
            first.sum().backward()
        else:
            (first * torch.randn(4, rows).t()).sum().add(second.sum()).backward()
        seen.append((first.detach(), second.detach(), x.grad, y.grad, marks(first), marks(second)))
    return seen


@scenario
def sizes_that_backward_needs(compile: Compile) -> Any:
    step = compile(lambda x: F.pad(x, (1, 2)).cos().mean(), dynamic=True)
    seen = []
    for columns in (3, 4, 7):
        x = leaf(5, columns)
        loss = step(x)
        loss.backward()
        seen.append((loss.detach(), x.grad, error_of(loss.backward)))
    return seen


@scenario
def images_in_channels_last(compile: Compile) -> Any:
    step = compile(lambda x, w: F.conv2d(x, w).relu(), dynamic=True)
    seen = []
    weight = leaf(4, 3, 1, 1)
    for rows in (5, 6, 8):
        x = torch.randn(2, 3, rows, 4).to(memory_format=torch.channels_last).requires_grad_()
        result = step(x, weight)
        result.backward(torch.randn(2, 4, rows, 4))
        seen.append((result.detach(), x.grad, result.stride()))
    return seen, weight.grad


@scenario
def an_input_of_changing_size_that_changes(compile: Compile) -> Any:
    def function(x: Tensor) -> Tensor:
        x.add_(1)
        return x.sum(0)

    step = compile(function, dynamic=True)
    inputs = [torch.zeros(rows, 2) for rows in (3, 4, 6, 6)]
    return [step(each) for each in inputs], inputs, [each._version > 0 for each in inputs]


# --- where torch's wrapper must stay


def test_inputs_that_overlap_are_left_to_torch(lean: list[StepPlan]):
    """If two inputs are views of one memory and one of them changes, AOTAutograd replaces both by their base."""

    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    step = torch.compile(function, backend=backend, options=OPTIONS)
    base, expected = torch.zeros(6), torch.zeros(6)
    for _ in range(3):
        result = step(base[:4], base[2:])
        torch.testing.assert_close(result, function(expected[:4], expected[2:]))
        torch.testing.assert_close(base, expected)
    assert not lean


def test_a_cached_step_is_not_used_for_inputs_that_overlap(cache: Any):
    def function(a: Tensor, b: Tensor) -> Tensor:
        a.add_(1)
        return b * 2

    options = {"cache_dir": str(cache), "warm_start": True, "native": False, "profile": "cpu-gloo"}
    for apart in (True, False):
        torch._dynamo.reset()
        step = torch.compile(function, backend=backend, options=options)
        base, expected = torch.zeros(8), torch.zeros(8)
        other = torch.zeros(4) if apart else base[2:6]
        other_expected = torch.zeros(4) if apart else expected[2:6]
        for _ in range(2):
            result = step(base[:4], other)
            torch.testing.assert_close(result, function(expected[:4], other_expected))
            torch.testing.assert_close(base, expected)


def test_a_tensor_returned_by_a_hook_is_checked_before_a_kernel_reads_it():
    step, x = torch.compile(lambda x: x.sin(), backend=backend, options={"warm_start": False}), leaf(4, 4)
    step(x).sum().backward()
    step(x).sum().backward()
    result = step(x)
    (saved,) = result.grad_fn._raw_saved_tensors
    saved.register_hooks(lambda packed: packed, lambda packed: packed[:2])
    with pytest.raises(LayoutError, match="was compiled for size"):
        result.sum().backward()
