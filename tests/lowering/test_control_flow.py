"""`cond`, `while_loop` and nested compile regions: branches and bodies are compiled as separate graphs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.nn.functional as F

from overlapc.report import record
from overlapc.runtime.counters import counted
from overlapc.schedule.text import parse
from tests.lowering.against_eager import compiled, same

SHAPES = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def branch(x, y):
    return torch.cond(x.sum() > 0, lambda a, b: (a * b + 1).sin(), lambda a, b: (a - b).cos(), (x, y)) * 2


@contextmanager
def newly(*names: str) -> Iterator[dict[str, int]]:
    """Yield a dict that holds, after the block, by how much the named counters grew inside it."""
    before = {name: counted(name) for name in names}
    made: dict[str, int] = {}
    yield made
    made.update({name: counted(name) - before[name] for name in names})


@SHAPES
def test_cond_takes_the_branch_of_each_call(dynamic):
    call = compiled(branch, dynamic)
    x, y = torch.rand(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(call(x, y), branch(x, y))
    torch.testing.assert_close(call(-x, y), branch(-x, y))


def test_cond_is_differentiable():
    y = torch.randn(4, 3)
    for sign in (1, -1):
        x = (torch.rand(4, 3) * sign).requires_grad_()
        expected = torch.autograd.grad(branch(x, y).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(compiled(branch)(x, y).sum(), x), expected)


def test_the_gradient_of_a_cond_has_its_results_strides_beside_overlapping_results() -> None:
    """In backward, tangents with other strides would give the branches different strides, which torch refuses."""

    def gradient(call, x):
        y, repeated, windows = call(x)
        return torch.autograd.grad((y, repeated, windows), x, (y.cos(), repeated.cos(), windows.cos()))

    def function(x):
        y = torch.cond(x.sum() > 0, lambda x: x.tanh(), lambda x: x.clamp(max=0.5).exp(), (x * 1,))
        return y, x.sum().expand(3), (x * 2).unfold(0, 2, 1)

    x = torch.randn(17, 3).t().requires_grad_()
    torch.testing.assert_close(gradient(compiled(function), x), gradient(function, x))


def test_the_gradient_of_a_loss_that_torch_traces_with_another_dtype_equals_eager():
    """AOTAutograd traces a float32 gradient of this loss, but eager's loss and its gradient are bfloat16."""
    from torch._higher_order_ops.while_loop import while_loop

    def loss(x, y):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            product = F.gelu(x @ x[:, None])
        target = F.huber_loss(y, x.expand_as(y), reduction="none", delta=0.7).detach()
        start = torch.zeros((), dtype=torch.int64), target.clone()
        target = while_loop(lambda i, _: i < 3, lambda i, each: (i + 1, each * 0.5 + i), start)[1]
        return F.mse_loss(target, product.expand_as(target), reduction="none")

    x, y = torch.tensor([1.5], requires_grad=True), torch.full((1, 1), 0.25, dtype=torch.bfloat16)
    torch._dynamo.reset()
    step = torch.compile(loss, backend="overlapc", fullgraph=True)
    (expected,) = torch.autograd.grad(loss(x, y).sum(), x)
    for _ in range(3):
        torch.testing.assert_close(torch.autograd.grad(step(x, y).sum(), x)[0], expected)


def test_while_loop_equals_eager():
    from torch._higher_order_ops.while_loop import while_loop

    def function(x):
        start = torch.tensor(0)
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2 + 1), (start, x))[1] * 3

    same(function, torch.randn(4))


@SHAPES
def test_branches_are_compiled_as_graphs_of_their_own(dynamic):
    x, y = torch.rand(4, 3), torch.randn(4, 3)
    with newly("graphs", "kernels", "fallbacks") as made:
        compiled(branch, dynamic)(x, y)
    # Kernels: the condition, one per branch, and the multiplication after it.
    assert made == {"graphs": 3, "kernels": 4, "fallbacks": 0}


def test_a_conditional_takes_as_long_as_its_longer_branch():
    def function(x):
        return torch.cond(x.sum() > 0, lambda a: a @ a @ a @ a, lambda a: a + 1, (x,))

    record.clear()
    compiled(function)(torch.randn(256, 256))
    (graph,) = record.report_of_process().steps[-1].graphs
    (conditional,) = (node for node in parse(graph.schedule).nodes if "cond" in node.name)
    assert conditional.estimate is not None
    assert conditional.estimate.source.startswith("simulated branches")
    assert conditional.estimate.ns > 3 * 2 * 256**3 / 1e12 * 1e9  # three matrix products at less than 1 TFLOP/s


def test_nested_branches_equal_eager():
    def inner(a):
        return torch.cond(a.max() > 1, lambda b: b.exp() * 2, lambda b: b.tanh() - 1, (a,))

    def function(x):
        return torch.cond(x.sum() > 0, lambda a: inner(a) + 1, lambda a: a.cos(), (x,))

    for x in (torch.full((4,), 2.0), torch.full((4,), 0.5), torch.full((4,), -1.0)):
        same(function, x)


def test_nested_compile_regions_are_compiled_once_and_called():
    from torch.compiler import nested_compile_region

    region = nested_compile_region(lambda x: (x * 2).sin() + x.mean())
    x = torch.randn(8, 4)
    with newly("graphs") as made:
        found = compiled(lambda x: region(region(x)) * 3)(x)
    once = (x * 2).sin() + x.mean()
    torch.testing.assert_close(found, ((once * 2).sin() + once.mean()) * 3)
    assert made == {"graphs": 2}
