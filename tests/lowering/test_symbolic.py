"""Symbolic sizes, and sizes and numbers that are known only at run time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree

from overlapc.fx.supported_torch import check_torch_version
from overlapc.runtime.counters import counted
from tests.codegen.interpreted import triton_on_cpu
from tests.lowering.against_eager import compiled, same

SHAPES = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])

CHECKS_BOOLS = pytest.mark.skipif(
    check_torch_version() < (2, 13), reason="AOTAutograd of torch 2.11 drops the check of a bool"
)


@pytest.fixture(autouse=True)
def whole_graphs():
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def first_rows(x, y):
    count = x.max().item()
    torch._check(count >= 0)
    torch._check(count <= y.size(0))
    return y[:count] * 2


def rows_of_ones(x):
    count = x.max().item()
    torch._check(count >= 0)
    return torch.zeros(count, 3) + 1


@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: (x[x > 0] ** 2).sum() + x[x > 0].exp().sum(),
        lambda x, n: x[(x > 0).nonzero()[:, 0]].sum() + x[(x > 0).nonzero()[:, 0]].mean(),
        lambda x, n: x[:, : n.item()].sum() * n.item() + x[:, : n.item()].mean(),
    ],
)
def test_gradients_equal_eager_if_data_give_the_same_size_twice(function):
    ours, theirs = (torch.arange(-3.0, 9.0).reshape(3, 4).requires_grad_() for _ in range(2))
    compiled(function)(ours, torch.tensor(2)).backward()
    function(theirs, torch.tensor(2)).backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_gradients_of_half_of_the_rows_that_data_choose_equal_eager():
    def halved(x: Tensor, mask: Tensor) -> Tensor:
        rows = x[mask.nonzero().squeeze(1)]
        return (rows[: rows.shape[0] // 2].sin() * 2).sum() + rows.cos().sum()

    torch._dynamo.reset()
    step = torch.compile(halved, backend="overlapc", dynamic=True, fullgraph=True)
    for count in (8, 11, 6):
        ours, theirs = (torch.arange(count * 3.0).reshape(count, 3).requires_grad_() for _ in range(2))
        mask = torch.arange(count) % 3 == 0
        step(ours, mask).backward()
        halved(theirs, mask).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    "function",
    [
        lambda rows: rows[1:].sin().sum(0),
        lambda rows: (rows[:-1] - rows[1:]).abs().sum(),
        lambda rows: (rows[2:][1:] * 2, rows[:3]),
        lambda rows: rows.t()[:, 1:].contiguous().view(-1).exp(),
        lambda rows: rows[1:].reshape(-1)[2:],
    ],
)
def test_slices_of_rows_that_data_choose_equal_eager(function):
    def run(x: Tensor, mask: Tensor) -> Any:
        return function(x[mask.nonzero().squeeze(1)])

    torch._dynamo.reset()
    step = torch.compile(run, backend="overlapc", fullgraph=True)
    for every in (3, 2):
        ours, theirs = (torch.arange(40.0).reshape(10, 4).div(20).requires_grad_() for _ in range(2))
        mask = torch.arange(10) % every == 0
        found, expected = (pytree.tree_leaves(each) for each in (step(ours, mask), run(theirs, mask)))
        torch.testing.assert_close(found, expected)
        for results in (found, expected):
            sum(result.sum() for result in results).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@SHAPES
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.nonzero() * 2 + 1,
        lambda x: (x[x > 0] * 2).sum(),
        lambda x: (x[x > 0].sum(), x[x < 0] * 3),
        lambda x: (x[x > 100] * 3, x[x > 100].sum()),  # nothing is selected
        lambda x: torch.masked_select(x, x > 0).exp(),
        lambda x: torch.cat([x.nonzero(), x.nonzero() + 1]),
        lambda x: x.nonzero().float().mean(0).softmax(0),
        lambda x: x[x.nonzero()[:, 0]] + 1,
        lambda x: x.round().unique() + 1,
    ],
)
def test_sizes_that_depend_on_data_equal_eager(function, dynamic):
    same(function, torch.randn(6, 4), dynamic=dynamic)


@SHAPES
def test_numbers_that_depend_on_data_equal_eager(dynamic):
    same(lambda x, y: y * x.sum().item(), torch.arange(4), torch.randn(3), dynamic=dynamic)
    same(lambda x, y: y * x.sum().item() + 1, torch.randn(4), torch.randn(3), dynamic=dynamic)
    same(first_rows, torch.tensor([1, 3]), torch.randn(6, 2), dynamic=dynamic)
    same(rows_of_ones, torch.tensor([1, 3]), dynamic=dynamic)
    same(torch.repeat_interleave, torch.randn(3), torch.tensor([1, 2, 0]), dynamic=dynamic)


def checked(x, y, promise):
    number = y.item()
    torch._check(promise(number, x))
    return x + number


@SHAPES
@pytest.mark.parametrize(
    ("promise", "kept", "broken"),
    [
        (lambda number, x: number == 3, 3, 4),
        (lambda number, x: number == x.max().int().item(), 1, 2),
        (lambda number, x: number // 2 == x.size(0), 8, 11),
        (lambda number, x: number >= 2, 2, 1),
        pytest.param(lambda number, x: number, True, False, marks=CHECKS_BOOLS),
    ],
)
def test_a_broken_promise_about_a_number_raises(promise, kept, broken, dynamic):
    call = compiled(lambda x, y: checked(x, y, promise), dynamic=dynamic)
    x = torch.ones(4, 3)
    assert torch.equal(call(x, torch.tensor([kept])), x + kept)
    with pytest.raises(RuntimeError, match="Runtime assertion failed"):
        call(x, torch.tensor([broken]))


@SHAPES
def test_a_bool_that_depends_on_data_is_returned_and_used(dynamic):
    call = compiled(lambda x: (bool(x[0].item()), x.all().item(), torch.full((3,), x.any().item())), dynamic=dynamic)
    for values in ([True, False], [False, True], [False, False]):
        first, every, filled = call(torch.tensor(values))
        assert (first, every, filled.tolist()) == (values[0], all(values), 3 * [any(values)])
        assert isinstance(first, bool)


@torch.library.custom_op("overlapc_tests::far_apart", mutates_args=())
def far_apart(count: Tensor) -> Tensor:
    return torch.empty_strided((1, 2), (int(count), 1)).fill_(3.0)


@far_apart.register_fake
def _(count):
    return torch.empty_strided((1, 2), (torch.library.get_ctx().new_dynamic_size(), 1))


def test_a_stride_that_depends_on_data_is_a_number():
    same(lambda x: torch.ones(torch.ops.overlapc_tests.far_apart(x).stride(0)) + x, torch.tensor([5]), dynamic=True)


def test_sizes_may_be_used_as_numbers_and_returned():
    same(lambda x: (x.size(0), x * x.size(0), x.numel() / 2, x / x.size(1) ** 0.5), torch.randn(7, 5), dynamic=True)
    same(lambda x: (x.var(0), x.std(1), F.layer_norm(x, (x.size(1),))), torch.randn(7, 5), dynamic=True)
    same(lambda x: (x.var(0, correction=9), *torch.var_mean(x, 1, correction=5)), torch.randn(7, 5), dynamic=True)
    same(lambda x: F.interpolate(x, scale_factor=1.5, mode="bilinear"), torch.randn(1, 2, 6, 5), dynamic=True)


def test_one_compilation_serves_all_sizes():
    torch._dynamo.utils.counters.clear()

    def function(x):
        return F.softmax(x @ x.t(), 1).sum(0) / x.size(0) + x.flip(0).roll(1, 0).sum(1)

    call = compiled(function, dynamic=True)
    for rows, columns in ((7, 5), (3, 11), (130, 64)):
        x = torch.randn(rows, columns)
        torch.testing.assert_close(call(x), function(x))
    assert counted("graphs") == 1
    assert counted("fallbacks") == 0


@SHAPES
def test_gradients_with_symbolic_sizes_equal_eager(dynamic):
    def function(x, weight):
        return F.batch_norm(F.gelu(x @ weight), None, None, training=True).square().mean()

    x, weight = torch.randn(9, 4, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    expected = torch.autograd.grad(function(x, weight), (x, weight))
    found = torch.autograd.grad(compiled(function, dynamic)(x, weight), (x, weight))
    torch.testing.assert_close(found, expected)


@SHAPES
def test_gradients_of_elements_that_changed_places_equal_eager(dynamic):
    def function(x):
        x = x.cumsum(0)
        x[::2] = x.flip(0)[::2]
        return x.flip(0).roll(1, 0)

    call = compiled(function, dynamic)
    for size in (6, 7, 300):
        x, weights = torch.randn(size, requires_grad=True), torch.randn(size)
        torch.testing.assert_close(*(torch.autograd.grad(each(x), x, weights) for each in (call, function)))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + x[: x.size(0) // 4],
        lambda x: x * x.diagonal(1, 0, -1)[:1],
        lambda x: x[torch.arange(x.size(0) - 2)[:, None], torch.arange(x.size(0) // 4)],
        lambda x: torch.where(x[: x.size(0) // 5] > 0, x, x[: x.size(0) // 4]).sum(0),
    ],
)
def test_a_size_that_is_one_only_by_a_guard_is_broadcast(function):
    same(function, torch.randn(6, 6), dynamic=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flatten().sin()[-1] * 2,
        lambda x: x[:1].expand(3, -1)[torch.arange(4) * 5 % 3],
        lambda x: x[:1, 0].expand(2).gather(0, torch.arange(3) * 5 % 2),
    ],
)
def test_single_positions_and_indices_of_one_element_equal_eager_in_triton(function):
    with triton_on_cpu():
        same(function, torch.randn(6, 6), dynamic=True)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x + (x.shape[0] & 3),
        lambda x: x * (x.shape[0] | 9) + (x.shape[0] ^ 5),
        lambda x: torch.full((3,), x.shape[0] & 3) + 1,
        lambda x: x.clamp(max=x.shape[0] & 3),
        lambda x: x + math.sqrt(x.shape[0] / 3) + min(x.shape[0] / 3, 2.5),
        lambda x: torch.add(x, x, alpha=x.shape[0] & 6),
    ],
)
def test_functions_of_sizes_that_no_kernel_computes_are_right(function):
    torch._dynamo.reset()
    call = torch.compile(function, backend="overlapc", dynamic=True)
    for length in (7, 12, 4):
        x = torch.randn(length, 3)
        torch.testing.assert_close(call(x), function(x))


@SHAPES
@pytest.mark.parametrize(
    "function",
    [
        lambda x, n: x + 100 // n,
        lambda x, n: x + 100 % n,
        lambda x, n: x * (100 / n),
        lambda x, n: x + 100 // (n * x.shape[0]) + 100 % n,
        lambda x, n: x.clamp(max=float(100 // n)),
        lambda x, n: x[100 % n :].sum(),
        lambda x, n: torch.arange(100 // n) + 1,
    ],
)
def test_a_size_that_is_divided_by_no_rows_is_an_error_as_in_eager(function, dynamic):
    def per_row(x):
        return function(x, (x > 0).nonzero().shape[0])

    step = compiled(per_row, dynamic)
    for x in (torch.tensor([3.0, -1, 2]), torch.ones(3)):
        torch.testing.assert_close(step(x), per_row(x))
    with pytest.raises(ZeroDivisionError):
        step(-torch.ones(3))


@SHAPES
@pytest.mark.parametrize("wrapper", ["python", "fx"])
def test_integers_computed_from_floats_that_depend_on_data_equal_eager(dynamic, wrapper):
    def scaled(x, y):
        number = y[0].item()
        tenths = int(number * 10)
        first = x[: tenths % 3 + 1].sum() + torch.full((3,), number * 2).sum()
        return (x * tenths).sin() + first + round(number * 3), tenths

    step = compiled(scaled, dynamic, wrapper=wrapper)
    for number in (0.55, 2.31, -0.72):
        ours, theirs = (torch.arange(12.0).reshape(4, 3).requires_grad_() for _ in range(2))
        found, wanted = (call(x, torch.tensor([number])) for call, x in ((step, ours), (scaled, theirs)))
        torch.testing.assert_close(found, wanted)
        found[0].sum().backward()
        wanted[0].sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_jagged_tensors_of_other_lengths_equal_eager():
    torch._dynamo.reset()
    call = torch.compile(lambda x: (x * 2).sin(), backend="overlapc")
    for lengths in ((2, 3), (4, 1), (5,)):
        parts = [torch.randn(length, 4) for length in lengths]
        x = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
        result = call(x)
        result.values().sum().backward()
        torch.testing.assert_close(result.values(), (x.values() * 2).sin())
        torch.testing.assert_close(x.grad.values(), 2 * (x.values() * 2).cos())
