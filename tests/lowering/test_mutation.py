"""In-place ops, views and aliases in compiled functions behave as in eager."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tests.lowering.against_eager import compiled, same

SHAPES = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def add_in_place(x):
    x.mul_(2)
    return x + 1


def views_in_place(x):
    x[1:3].add_(1)
    x[0].zero_()
    return x * 2


def disjoint_views(x):
    first, rest = x[:2], x[2:]
    first.add_(1)
    rest.mul_(3)
    return first + rest


def twice(x):
    x.add_(1)
    between = x * 2
    x.mul_(3)
    return between + x


def returns_a_view_of_what_it_changed(x):
    x.add_(1)
    return x.t()


@SHAPES
@pytest.mark.parametrize(
    "function", [add_in_place, views_in_place, disjoint_views, twice, returns_a_view_of_what_it_changed]
)
def test_inputs_are_changed_as_in_eager(function, dynamic):
    same(function, torch.randn(4, 3), dynamic=dynamic)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_inputs_are_changed_in_every_grad_mode(mode):
    x = torch.randn(4, 3)
    with mode():
        same(add_in_place, x)


@SHAPES
def test_outputs_may_alias_inputs_and_each_other(dynamic):
    def views(x):
        return x, x.view(-1), x.t(), x[1:]

    same(views, torch.randn(4, 3), dynamic=dynamic)
    x = torch.randn(4, 3)
    for view in compiled(views, dynamic)(x):
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@SHAPES
@pytest.mark.parametrize("second", [lambda x: x[4:], lambda x: x.view(5, 2), lambda x: x])
def test_inputs_may_alias_each_other(second, dynamic):
    def change_one(x, y):
        x.add_(1)
        return y * 2

    a, b = torch.arange(10.0), torch.arange(10.0)
    expected = change_one(a[:6] if second(a).numel() == 6 else a, second(a))
    found = compiled(change_one, dynamic)(b[:6] if second(b).numel() == 6 else b, second(b))
    torch.testing.assert_close((found, b), (expected, a), rtol=0, atol=0)


def test_batch_norm_changes_its_statistics_and_counts():
    eager = torch.nn.BatchNorm1d(3)
    ours = torch.nn.BatchNorm1d(3)
    x = torch.randn(8, 3)
    for _ in range(2):  # each graph mutates the same buffers twice
        torch.testing.assert_close(compiled(lambda x: ours(ours(x)))(x), eager(eager(x)))
    torch.testing.assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))


@SHAPES
def test_a_detached_alias_that_changed_has_a_gradient_of_its_own(dynamic):
    """The graph before the break returns both; one tensor for both would accumulate both gradients."""

    def function(x):
        v = x**3
        w = v.detach()
        w.copy_(x + 2)
        torch._dynamo.graph_break()
        return v.exp(), w * 2

    a = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    b = a.detach().clone().requires_grad_()
    function(a)[0].sum().backward()
    torch.compile(function, backend="overlapc", dynamic=dynamic)(b)[0].sum().backward()
    torch.testing.assert_close(b.grad, a.grad)


@SHAPES
def test_tangents_need_not_be_contiguous(dynamic):
    def function(x):
        return (x * 2).sin()

    x = torch.randn(4, 3)
    for tangent in (torch.randn(3, 4).t(), torch.tensor(2.0).expand(4, 3)):
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        function(a).backward(tangent)
        compiled(function, dynamic)(b).backward(tangent)
        torch.testing.assert_close(b.grad, a.grad)


@SHAPES
def test_inputs_with_gaps_and_offsets_equal_eager(dynamic):
    same(lambda x: (x.t() * 2).contiguous() + x.t(), torch.randn(8, 6)[::2, 1::2], dynamic=dynamic)


def test_custom_ops_may_write_into_an_argument():
    @torch.library.custom_op("overlapc_tests::add_one_", mutates_args=("x",))
    def add_one(x: torch.Tensor) -> None:
        x.add_(1)

    def function(x):
        y = x * 2
        add_one(y)
        add_one(x)
        return y * 3

    same(function, torch.randn(5))
