"""Backward reads the content that an input had when forward used it, also if forward changed the input afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from overlapc.backend import overlapc
from tests.parallel.tiny import Recorder, ops

Function = Callable[[Tensor, Tensor], object]


def by_all(x: Tensor, w: Tensor) -> Tensor:
    v = x.sin() * w
    x.add_(1)
    return v


def through_a_view(x: Tensor, w: Tensor) -> Tensor:
    v = x[torch.tensor([3, -1, 0])] * w
    x.select(0, 0).add_(1)
    return v


def saved_as_a_view(x: Tensor, w: Tensor) -> Tensor:
    view = x.as_strided((2, 3), (1, 2))
    v = torch.where(view > 0, view, view * 0.5)
    view.diagonal().add_(2)
    return v * w.sum() + view * w


def and_returned(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    v = x.t().exp().t() * w
    x.mul_(3)
    return v, x, x[0]


def several_times(x: Tensor, w: Tensor) -> Tensor:
    v = x.exp() * w
    x.mul_(3)
    u = x.sin() * w
    x.scatter_(0, torch.tensor([[0, 1, 2]]), 9.0)
    return v + u + x.cos() * w


def without_gradient(x: Tensor, w: Tensor) -> Tensor:
    v = x.exp() * w
    with torch.no_grad():
        x.mul_(3)
    x.detach().sub_(1)
    return v


def by_what_has_a_gradient(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    v = x.tanh() * w
    x.mul_(w)  # AOTAutograd's wrapper writes it back
    return v, x


def unseen_by_autograd(x: Tensor, w: Tensor) -> Tensor:
    v = x.sin() * w + x * w
    x.data.mul_(3)  # eager's gradient of `x * w` uses the changed x, its gradient of `x.sin() * w` does not
    return v


class SavesIt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        ctx.x = x
        return x.sin() * w

    @staticmethod
    def backward(ctx, grad: Tensor):
        ctx.x.add_(1)
        return None, (grad * ctx.x.sin()).sum(0)


def in_backward(x: Tensor, w: Tensor) -> Tensor:
    return SavesIt.apply(x, w)


def inputs() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(4, 3), torch.randn(3, requires_grad=True)


def results(function: Function, x: Tensor, w: Tensor) -> list[Tensor]:
    out = function(x, w)
    out = out if isinstance(out, tuple) else (out,)
    torch.stack([(each * each).sum() for each in out if each.requires_grad]).sum().backward()
    assert w.grad is not None
    return [*out, x, w.grad]


@pytest.mark.parametrize(
    "function",
    [
        by_all,
        through_a_view,
        saved_as_a_view,
        and_returned,
        several_times,
        without_gradient,
        by_what_has_a_gradient,
        unseen_by_autograd,
        in_backward,
    ],
)
def test_gradients_use_the_content_before_the_change(function: Function) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=overlapc)
    expected = results(function, *inputs())
    for _ in range(2):  # the second call bypasses AOTAutograd's wrapper
        torch.testing.assert_close(results(compiled, *inputs()), expected)


def test_gradients_use_the_content_before_a_change_through_an_overlapping_input() -> None:
    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        v = x.sin() * w
        y.add_(1)
        return v * x.cos()

    def run(function: Callable[..., Tensor]) -> list[Tensor]:
        x, w = inputs()
        v = function(x, x[1:3], w)
        return [v, x, *torch.autograd.grad(v.square().sum(), w)]

    torch._dynamo.reset()
    torch.testing.assert_close(run(torch.compile(function, backend=overlapc)), run(function))


def graphs(function: Function) -> tuple[list[str], list[str]]:
    torch._dynamo.reset()
    recorder = Recorder()
    results(torch.compile(function, backend=recorder), *inputs())
    return ops(recorder.forward[0]), ops(recorder.backward[0])


def test_an_input_is_copied_only_if_backward_reads_its_old_content() -> None:
    forward, backward = graphs(lambda x, w: x.add_((x * w).sum().detach()) * w)
    assert "copy_" in forward
    assert "clone" not in forward + backward

    forward, backward = graphs(by_all)
    assert "copy_" in forward
    assert forward.count("clone") == (1 if "sin" in backward else 0)


class ChangesItsGradient(torch.autograd.Function):
    """Expert parallelism of NeMo Automodel reduces the gradient that its backward gets in place."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        before = gradient.sum()
        gradient.mul_(2)
        return gradient * before


@pytest.mark.parametrize("behind", [None, torch.cos], ids=["a result", "an inner value"])
def test_a_backward_may_change_the_gradient_that_it_gets(behind):
    def step(x: Tensor) -> Tensor:
        result = ChangesItsGradient.apply(x.sin())
        return result if behind is None else behind(result)

    gradients = []
    for call in (step, torch.compile(step, backend="overlapc", fullgraph=True)):
        x = torch.arange(4.0, requires_grad=True)
        call(x).backward(torch.arange(1.0, 5.0))
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
