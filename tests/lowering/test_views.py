"""Views: strided layouts over a buffer where a layout can describe the view, and copies where it cannot."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from overlapc.errors import CompileError
from overlapc.runtime.counters import counted
from tests.lowering.against_eager import compiled, same

SHAPES = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).view(torch.int32) + 1,
        lambda x: (x * 2).view(torch.int32).add_(1).view(torch.float32) * 3,
        lambda x: (x * 2).view(torch.int16)[:, ::2] + 1,
        lambda x: torch.view_as_complex((x + 1).view(4, 2, 2)).conj().real * 2,
        lambda x: torch.view_as_real(torch.view_as_complex((x + 1).view(4, 2, 2)).conj_physical()) * 2,
        lambda x: torch.view_as_complex((x + 1).view(4, 2, 2)).conj().imag + 1,  # carries the negative bit
        lambda x: (x[0] * 2).expand(3, 4).view(torch.int32) + 1,
        lambda x: torch.view_as_real(torch.view_as_complex(x.view(8, 2)).expand(3, 8)) * 2,
    ],
)
def test_views_that_a_strided_layout_cannot_describe_equal_eager(function):
    same(function, torch.randn(4, 4))


def test_the_gradient_of_a_sum_of_complex_numbers_equals_eager():
    """It is one number, expanded to all elements and viewed as pairs."""
    x = torch.randn(3, 4, requires_grad=True)
    compiled(lambda x: torch.complex(x, 2 * x).sum().real)(x).backward()
    torch.testing.assert_close(x.grad, torch.ones(3, 4))


def test_memory_under_a_view_of_another_dtype_is_not_reused():
    def function(x):
        bits = (x * 2).view(torch.int32)
        other = x * 3  # would reuse the memory of x * 2 if that were freed too early
        return bits + 1, other, (other + 1).sum()

    same(function, torch.randn(64, 64))


@SHAPES
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.flip(0, 1) + 1,
        lambda x: x.flip(-1) * x,
        lambda x: x.roll(2, 0) + x.roll((1, -1), (0, 1)),
        lambda x: x.roll(3) * 2,
        lambda x: x.repeat(2, 1, 3) + 1,
        lambda x: x[:, :1].repeat(1, 4) * 2,
        lambda x: x.unfold(0, 3, 1).sum(-1),
        lambda x: x.as_strided((x.size(0) - 2, x.size(1)), (x.size(1), 1), 1) * 2,
        lambda x: torch.cat([x[None].expand(3, -1, -1).reshape(-1, x.size(1)), x]).sum(0) / x.size(0),
        lambda x: torch.stack([x, x + 1], 1).flatten(),
        lambda x: x.diagonal() * 2,
        lambda x: torch.diagonal_scatter(x, x.diagonal() * 2),
        lambda x: torch.block_diag(x, x, x),
        lambda x: F.pad(x, (1, 2, 3, 0), value=2.0) * 2,
        lambda x: F.pad(x, (-1, 2, 3, -2)) * 2,
        lambda x: F.pad(x, (-2, 0, 0, -1)) * 2,
    ],
)
def test_ops_that_rearrange_elements_equal_eager(function, dynamic):
    same(function, torch.randn(7, 5), dynamic=dynamic)


@pytest.mark.parametrize("count", [2, 3, 5])
def test_a_cat_may_contain_a_tensor_more_than_once(count):
    same(lambda x, y: torch.cat([x, y, x, *[y] * count], 1) + 1, torch.randn(3, 2), torch.randn(3, 4))


def test_a_cat_may_contain_empty_parts():
    same(lambda x: torch.cat([x[:, :0], x, x[:, 5:], x + 1], 1) * 2, torch.randn(3, 5))


@SHAPES
def test_tensors_without_elements_or_dims_equal_eager(dynamic):
    same(lambda x: (x * 2, x.sum(), x.sum(1), x.mean(), x.t() + 1, F.softmax(x, 1)), torch.randn(3, 0), dynamic=dynamic)
    same(lambda x: (x * 2).sum() + x.exp(), torch.tensor(1.5), dynamic=dynamic)
    same(lambda x: (x.prod(), x.bool().all(), x.bool().any()), torch.randn(0), dynamic=dynamic)


def test_rearranging_is_generated_code():
    torch._dynamo.utils.counters.clear()
    same(lambda x: x.flip(0) + x.roll(1, 1) + x.repeat(1, 2)[:, :5], torch.randn(4, 5))
    assert counted("fallbacks") == 0
    assert counted("kernels") == 1


@pytest.mark.parametrize("change", [False, True])
def test_inputs_with_a_negative_or_conjugate_bit_equal_eager(change):
    def function(x, y):
        if change:
            x.mul_(2)
        return x + 1, (x * 2).sum(), torch.view_as_real(y * 1).sum(0)

    def arguments():
        return torch._neg_view(torch.arange(8.0)), torch.arange(4).to(torch.complex64).mul(1 + 2j).conj()

    negative, conjugate = arguments()
    assert negative.is_neg()
    assert conjugate.is_conj()
    expected = function(negative, conjugate)
    found_arguments = arguments()
    torch.testing.assert_close(compiled(function)(*found_arguments), expected)
    torch.testing.assert_close(found_arguments, (negative, conjugate))


def test_as_strided_offsets_count_from_the_start_of_the_callers_storage():
    def function(x):
        return x.as_strided((2,), (1,), 1) * 2, x[1:].as_strided((3,), (2,), 0) + x.sum()

    memory = torch.arange(40.0)
    torch._dynamo.reset()
    compiled_once = torch.compile(function, backend="overlapc")
    for x in (memory[6:16].clone(), memory[6:16], memory[:10], memory[8:18]):  # no guard distinguishes them
        for got, wanted in zip(compiled_once(x), function(x), strict=True):
            assert torch.equal(got, wanted)


def test_as_strided_of_a_view_counts_from_the_start_of_the_callers_storage():
    def function(x):
        part = x.as_strided((5,), (1,), 1)
        return part.as_strided((3, 2), (1, 1), 0) + 1, part[1:].as_strided((3,), (4,)) * 2, part.as_strided((2,), (9,))

    memory = torch.arange(40.0)
    torch._dynamo.reset()
    compiled_once = torch.compile(function, backend="overlapc")
    for x in (memory[:20].clone(), memory[20:]):
        for got, wanted in zip(compiled_once(x), function(x), strict=True):
            assert torch.equal(got, wanted)


def test_as_strided_past_a_copied_view_is_an_error():
    def function(x):
        return x[4:].view(torch.int32).as_strided((3,), (1,), 0) + 1

    torch._dynamo.reset()
    with pytest.raises(CompileError, match="as_strided reads past a view of another dtype"):
        torch.compile(function, backend="overlapc")(torch.arange(20.0))


@pytest.mark.parametrize("read", [lambda _: 1.0, torch.sin, lambda view: view.t().cos()])
@pytest.mark.parametrize("options", [{}, {"check_lifecycle": True}])
def test_a_returned_as_strided_of_a_part_of_an_input_shares_its_memory(options, read):
    def function(x):
        last = x.split(2, 1)[-1]
        view = last.as_strided((11, 2), (2, 1), 1)
        return view, last.sin(), read(view) * torch.ones(2)[0]

    x = torch.randn(5, 6).requires_grad_() * 1
    results = function(x), torch.compile(function, backend="overlapc", options=options)(x)
    wanted, got = ([y.detach() for y in each] for each in results)
    torch.testing.assert_close(got, wanted)
    with torch.no_grad():
        x.mul_(2)
    torch.testing.assert_close(got, wanted)


def test_as_strided_of_a_gradient_counts_from_the_start_of_its_storage():
    def function(x):
        return torch.as_strided_scatter(x, x.flatten()[:2], (2,), (1,), 1)

    x = torch.randn(7, 6)[1:].requires_grad_()  # has a storage offset, as the traced result has; the gradient has none
    gradient = torch.randn(6, 6)
    wanted = torch.autograd.grad(function(x), x, gradient)[0]
    torch._dynamo.reset()
    (got,) = torch.autograd.grad(torch.compile(function, backend="overlapc")(x), x, gradient)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: (x * 2).unfold(1, 2, 1),
        lambda x: (x * 2).as_strided((2, 3), (1, 1)),
        lambda x: (x * 2).expand(3, 4),
        lambda x: x.unfold(1, 2, 1),
    ],
)
def test_gradients_of_overlapping_results_equal_eager(function):
    def gradient(call):
        x = torch.arange(4.0).reshape(1, 4).requires_grad_()
        y = call(x)
        return torch.autograd.grad(y, x, torch.arange(float(y.numel())).reshape(y.shape))[0]

    torch.testing.assert_close(gradient(compiled(function)), gradient(function))


@pytest.mark.parametrize("options", [{}, {"wrapper": "fx"}, {"memory": "pool"}], ids=str)
def test_a_returned_view_of_another_dtype_shares_the_memory_of_its_base(options):
    def function(x):
        y = x * 2
        bits = y.view(torch.int32)
        return y, bits, y.t()[1:].view(torch.int32), bits + 1, (y * 2).view(torch.int32)

    x = torch.randn(4, 5)
    found, expected = compiled(function, **options)(x), function(x)
    torch.testing.assert_close(found, expected, check_stride=True)
    found[0].mul_(3)
    assert torch.equal(found[1], found[0].view(torch.int32))
    assert torch.equal(found[2], found[0].t()[1:].view(torch.int32))


WRAPPERS = pytest.mark.parametrize("options", [{}, {"wrapper": "fx"}], ids=str)


@WRAPPERS
@pytest.mark.parametrize(
    "view",
    [
        lambda y: y.conj(),
        lambda y: y.mH,
        lambda y: y.real,
        lambda y: y.conj().imag,  # carries the negative bit
        lambda y: torch.view_as_real(y)[1:],
        lambda y: torch.view_as_real(y).view(torch.float64),
        lambda y: torch.view_as_real(y).view(torch.int16)[..., 1::2],
        lambda y: torch.view_as_complex(torch.view_as_real(y)),
    ],
)
def test_returned_views_that_no_strided_layout_describes_are_eagers(view, options):
    def function(x):
        y = x * 2
        return y, view(y), view(y[1:])

    x = torch.randn(3, 3, dtype=torch.complex64)
    expected, found = function(x), compiled(function, **options)(x)
    for results in (expected, found):
        results[0].mul_(1j)
    torch.testing.assert_close(found, expected, check_stride=True)
    assert [(y.is_conj(), y.is_neg()) for y in found] == [(y.is_conj(), y.is_neg()) for y in expected]


@WRAPPERS
@pytest.mark.parametrize(
    "function",
    [
        lambda x: ((y := x * 2)[0], y[1]),
        lambda x: ((y := x * 2).t(), y.view(-1)),
        lambda x: ((y := x * 2)[:1], y.detach()[1:], y.sum()),
        lambda x: ((y := x * 2).detach().view(-1), y),
    ],
)
def test_results_that_share_memory_may_be_changed_in_place(function, options):
    def changed(call):
        x = torch.arange(4.0).reshape(2, 2).requires_grad_()
        results = call(x)
        for result in results:
            result.mul_(3)
        return results, torch.autograd.grad(sum(y.sum() for y in results if y.requires_grad), x)

    torch.testing.assert_close(changed(compiled(function, **options)), changed(function))


@WRAPPERS
@pytest.mark.parametrize(
    "function",
    [
        lambda x: ((y := x.exp()).detach(), y),
        lambda x: ((y := x.exp()).detach().view(-1), y),
        lambda x: ((y := x.exp()).detach(), y.sum()),
        lambda x: ((y := x.exp()).detach()[:2], (y * 2).sum()),
    ],
)
def test_a_change_of_a_detached_result_that_backward_reads_is_an_error(function, options):
    detached, result = compiled(function, **options)(torch.randn(3, 2, requires_grad=True))
    detached.zero_()
    with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
        result.sum().backward()


def test_results_of_decomposed_ops_have_eagers_strides():
    x, rows, more = torch.randn(5, 6), torch.rand(6), torch.rand(5, 1, 6)
    mask = torch.rand(5, 6) > 0.5

    def function(x, rows, more, mask):
        y, z = x.t(), x.t().contiguous()
        aten = torch.ops.aten
        yield torch.div(y, rows[:, None], rounding_mode="floor")
        yield torch.div(z, y, rounding_mode="trunc")
        yield torch.div(torch.stack([z, z])[:, :, ::2], y[:, ::2], rounding_mode="floor")
        yield torch.copysign(rows[:, None], y)
        yield torch.copysign(y, rows[0])
        yield torch.logical_and(rows[:, None], y)
        yield torch.xlogy(more, x.t().abs().t())
        yield torch.logaddexp(more, y.t())
        yield torch.heaviside(z, y)
        yield 2.0**y
        yield torch.ldexp(rows[:, None], y)
        yield aten.gelu_backward(rows[:, None].expand(6, 5), y)
        yield aten.hardtanh_backward(z, y, -1.0, 1.0)
        yield aten.threshold_backward(z, y, 0.0)
        yield aten.mse_loss_backward(torch.ones(()), y, y, 1)
        yield aten.native_dropout_backward(y, mask.t(), 2.0)
        yield torch.clip(y, rows[:, None], rows[:, None] + 1)
        low = y.bfloat16()
        one, row = (each.expand(6, 5) for each in (low.sum(), low[:, :1]))
        for wide, narrow in ((row, low), (one, low), (row, y), (y.sum().expand(6, 5), low)):
            yield wide * narrow
            yield torch.maximum(wide, narrow)
            yield wide > narrow
            yield torch.atan2(wide, narrow) + wide
        places = torch.arange(4).view(2, 2)
        yield y[None, places[0]]
        yield x[places.t()]
        yield y[:, places.t(), None]
        yield x[places.t(), places]
        yield aten.index.Tensor(more[None], [places[0, 0], None, places[0, 0]])
        shared = y.unsqueeze(1).expand(-1, 2, -1)
        yield torch.slice_scatter(shared, shared[:, :, :1] * 2, 2, -1)
        yield torch.select_scatter(shared, shared[:, :, 0] * 2, 2, 1)
        empty = x[:0].expand(2, 0, -1)
        yield torch.select_scatter(empty, empty[0], 0, 1)

    def results(*args):
        return list(function(*args))

    for found, expected in zip(compiled(results)(x, rows, more, mask), results(x, rows, more, mask), strict=True):
        torch.testing.assert_close(found, expected, check_stride=True)


@pytest.mark.parametrize("dense", [True, False], ids=["dense", "expanded"])
def test_the_gradient_of_logsigmoid_is_laid_out_as_what_comes_back(dense: bool):
    def gradient(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(F.logsigmoid, x)[1](grad)[0]

    x = torch.randn(4, 6).t()
    grad = torch.randn(6, 4) if dense else torch.ones(()).expand(6, 4)
    found, expected = torch.compile(gradient, backend="overlapc")(x, grad), gradient(x, grad)
    assert found.stride() == expected.stride() == (4, 1)
    torch.testing.assert_close(found, expected)
    like_x = torch.randn(4, 6).t()
    assert torch.compile(gradient, backend="overlapc")(x.contiguous(), like_x).stride() == (1, 6)


def test_logsigmoid_is_contiguous_on_a_cpu_as_in_eager():
    def function(x):
        return F.logsigmoid(x.t()), F.logsigmoid(x[:, ::2])

    x = torch.randn(5, 6)
    for found, expected in zip(compiled(function)(x), function(x), strict=True):
        torch.testing.assert_close(found, expected, check_stride=True)
