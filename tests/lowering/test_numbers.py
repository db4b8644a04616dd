"""Numerics equal eager's: integers wrap, bools are logical values, low precision is rounded where eager rounds it."""

from __future__ import annotations

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.fx.decompositions import decompositions
from overlapc.ir.ops import Loops
from overlapc.lowering import lower
from tests.codegen.interpreted import triton_on_cpu
from tests.lowering.against_eager import compiled, same

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_wrap_and_divide_as_in_eager(dtype):
    x = torch.arange(-5, 6).to(dtype)
    y = torch.tensor([3, -2, 7, 1, 5, 2, 9, -3, 4, 6, 2]).to(dtype)

    def function(x, y):
        return x * 100, x * y * 77, x // y, x % y, torch.fmod(x, y), x - y, (x << 3) >> 1, x & y, x | y, x ^ y, ~x

    same(function, x, y)
    same(lambda x, y: (x.sum(), x.prod(), x.float().mean(), x.amax(), x.argmin(), x / y, x.clamp(1, 4), x**2), x, y)


@pytest.mark.parametrize("dtype", INTEGERS[:4])
def test_ranges_of_narrow_integers_wrap_around(dtype):
    length = 70_000 if dtype is torch.int16 else 300
    x = torch.randn(length)

    def function(x, targets):
        positions = torch.arange(length, dtype=dtype)
        hot = torch.where(positions == targets[:, None], 2.0, 0.0).sum(1)
        return torch.where(positions >= 100, x, -x), positions.long() + 1, x[positions.long().abs()] + 1, hot

    same(function, x, torch.tensor([3, 100, 44]).to(dtype))


@pytest.fixture(params=["cpp", "triton"])
def generator(request):
    """Run the test with C++ kernels and with interpreted Triton kernels."""
    with triton_on_cpu() if request.param == "triton" else nullcontext():
        yield request.param


def test_numbers_beyond_an_integers_range_wrap(generator):
    small = torch.tensor([0, 1, 3, 4, 200, 254, 255], dtype=torch.uint8)
    signed = torch.tensor([-128, -7, -1, 0, 44, 127], dtype=torch.int8)
    wide = torch.tensor([-(2**31), -7, 0, 44, 2**31 - 1], dtype=torch.int32)
    same(lambda x: (x + -1, x * -3, x == -1, x > -1, torch.where(x > 3, x, -1), x.masked_fill(x > 3, -1)), small)
    same(lambda x: (x + 300, x == 300, x < 300, x & 0x1FF, torch.full_like(x, -3.7)), signed)
    same(lambda x: (x + 2**31, x < 2**40, x.short() & 0x1FFFF, x - 2**33), wide)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.clamp(max=300),
        lambda x: x.clamp_min(-300),
        lambda x: torch.full_like(x, 300),
        lambda x: torch.full_like(x, math.nan),
        lambda x: x.masked_fill(x > 0, 300),
        lambda x: torch.where(x > 0, x, 300),
        lambda x: F.pad(x, (1, 1), value=300),
        lambda x: x.scatter(0, torch.tensor([0]), 300),
    ],
)
def test_numbers_that_an_integer_dtype_cannot_hold_are_an_error_as_in_eager(function):
    x = torch.tensor([1, 100, 127], dtype=torch.int8)
    for call in (function, compiled(function)):
        with pytest.raises(RuntimeError, match="cannot be converted to type int8_t without overflow"):
            call(x)


def test_casts_of_out_of_range_floats_to_integers_equal_eager():
    special = [math.nan, math.inf, -math.inf, 300.0, -300.0, 4e4, -7e4, 3e9, -3e9, 5e9, 2.0**31, 2.0**63, -1.7, 70001.0]

    def function(x):
        floats = x, x * 1.5, (x * 3.03).clamp(-9, 9), torch.where(x > 0, x, x * 2), torch.maximum(x, x * 0), x.relu()
        constants = torch.full_like(x, math.nan), torch.where(x > 0, math.inf, x), torch.full_like(x, 3e4)
        return [one.to(dtype) for one in floats + constants for dtype in INTEGERS]

    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        same(function, torch.tensor(special * 3, dtype=torch.float64).to(dtype))  # long enough for vectors and a tail


def test_numbers_halfway_between_two_floats_are_rounded_as_in_eager(generator):
    numbers = 1 + 2**-24, -(1 + 3 * 2**-24), 1.5 * 2**-149

    def function(x):
        return [y for number in numbers for y in (torch.full_like(x, number), x * number)]

    same(function, torch.ones(5), rtol=0, atol=0)


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_far_below_zero_are_not_computed_in_int32(generator, dynamic):
    def function(x, step):
        return (
            torch.arange(0, -12_000_000_000, -3_000_000_000) + x,
            torch.arange(4) * step,
            torch.arange(0, 4 * step, step),
        )

    call = compiled(function, dynamic=dynamic)
    for step in (-1, -16, -3_000_000_000, 3_000_000_000):
        for ours, eagers in zip(call(torch.arange(4), step), function(torch.arange(4), step), strict=True):
            assert torch.equal(ours, eagers), step


def test_the_variance_of_equal_numbers_is_0(generator):
    def function(x):
        return x.var(1), x.std(0), x.std(1, correction=2), x.var(), x.std(1, correction=0), x.T.var(0, correction=0)

    for shape in ((3, 40), (2, 1400)):  # in Triton: a whole row in one block, and a loop over parts of a row
        found = compiled(function)(torch.full(shape, 0.7134))
        assert not any(one.any() for one in found), found
    counters.clear()
    same(lambda x: (x.std(1), x.var(0, correction=0)), torch.randn(4, 300))
    assert not counters["overlapc"]["extern_calls"]


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_variance_of_no_numbers_is_nan(generator, dynamic):
    def function(x):
        rows = x.std(0), x.var(0, correction=0), *torch.var_mean(x, 0), *torch.std_mean(x, 0, keepdim=True)
        return *rows, x.var(1), x.var(0) + 1e-5, x.var(), x.double().std()

    call = compiled(function, dynamic)
    for count in (6, 5, 0):
        x = torch.randn(count, 4)
        torch.testing.assert_close(call(x), function(x), equal_nan=True)


@pytest.mark.parametrize("name", ["amax", "amin", "max", "min", "argmax", "argmin"])
def test_the_extreme_of_no_numbers_is_an_error(name):
    def function(x):
        return getattr(x + 1, name)(dim=0)

    call = compiled(function, dynamic=True)
    call(torch.randn(6, 4))
    for one in (function, call):
        with pytest.raises((RuntimeError, IndexError), match=r"(?i)dim|reduc"):
            one(torch.randn(0, 4))


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("dims", [(), (0,)])
def test_the_extreme_of_a_computed_number_of_rows_is_an_error_if_there_are_none(name, dims):
    def function(x):
        return getattr(x[: x.shape[0] // 4], name)(*dims)

    call = compiled(function, dynamic=True)
    torch.testing.assert_close(call(torch.ones(12, 5)), function(torch.ones(12, 5)))
    with pytest.raises((RuntimeError, IndexError), match="Expected reduction dim"):
        call(torch.ones(3, 5))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.float32, torch.bfloat16])
def test_any_and_all_over_no_dims_test_each_element(generator, dtype):
    def function(x):
        return (
            x.any(dim=()),
            torch.all(x, dim=[]),
            torch.any(x, dim=[], keepdim=True),
            x.any(dim=None),
            x.all(dim=(0, 1)),
        )

    same(function, torch.tensor([[0, 1, 2], [0, 0, 3]]).to(dtype))
    same(function, torch.zeros(0, 3, dtype=dtype))


def test_a_number_compared_with_a_tensor_is_rounded_to_its_dtype(generator):
    numbers = torch.tensor([0.1, -0.1, 0.3, 0.0, 2.5, 257.0])

    def function(x):
        return x == 0.1, x != 0.1, x >= 0.1, x > 0.1, x < 0.3, x >= 0.1, x == 257, torch.remainder(x, 0.1), x.fmod(0.3)

    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        same(function, numbers.to(dtype))
    same(lambda x, y: (x == y, x < y, x >= y.double()), numbers.bfloat16(), torch.tensor([0, 1, 2, 3, 4, 257]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tensors_of_other_dtypes_are_rounded_to_low_precision_where_eager_does(dtype):
    def function(x, number, counts):
        sums = x + number, number - x, x - counts, torch.atan2(x, number), torch.hypot(counts, x), x.abs() ** number
        return *sums, x * number, number * x, x / number, number / x, torch.div(x, number, rounding_mode="floor")

    given = torch.randn(400).to(dtype), torch.tensor(-0.23717), torch.arange(400)
    for ours, eagers in zip(compiled(function)(*given), function(*given), strict=True):
        assert torch.equal(ours, eagers)


def test_doubles_are_compared_with_doubles(generator):
    x = torch.tensor([0.1, 0.3, -0.1], dtype=torch.float32).double()
    x = torch.cat([x, torch.tensor([0.1, 0.3, -0.1], dtype=torch.float64)])
    same(lambda x: (x == 0.1, x != 0.3, x > 0.1, x <= 0.3, x >= -0.1, x < -0.1, x * 0.1 + 0.3), x)


def test_bools_are_logical_values():
    x = torch.tensor([[True, False], [True, True]])
    same(lambda x: (x & True, x | False, x ^ True, ~x, x + x, x * x, x.any(0), x.all(), x.sum(), x.float().mean()), x)
    same(lambda x: (x > 0, x == True, x.to(torch.uint8) - 1, x.cumsum(0), torch.where(x, 2, 3)), x)  # noqa: E712


def test_rounding_functions_equal_eager():
    x = torch.tensor([0.5, 1.5, -2.5, 2.49, -0.5, 1e9, -0.0])
    same(lambda x: (x.round(), x.round(decimals=1), x.trunc(), x.to(torch.int32), x.floor(), x.frac(), x.sign()), x)


def test_special_values_equal_eager(generator):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0])
    same(lambda x: (x.amax(), x.argmax(), x.clamp(0, 1), torch.maximum(x, x.flip(0)), x.isnan(), x.nan_to_num()), x)
    same(lambda x: (x.max(0), x.nansum(), torch.fmax(x, x.flip(0)), torch.copysign(x, x.flip(0)), x.relu()), x)


@pytest.mark.parametrize("exponent", [-0.5, 0.5])
def test_a_power_whose_exponent_is_a_tensor_on_the_cpu_is_no_root(exponent):
    x = torch.tensor([-float("inf"), 4.0])  # the square root of -inf is nan, its power is inf
    same(lambda x: x ** torch.tensor(exponent), x)
    same(lambda x: x**exponent, x)


LOW = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])


@LOW
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.layer_norm(x, (33,)),
        lambda x: F.softmax(x, 1),
        lambda x: F.gelu(x),
        lambda x: (x.var(1), x.sum(0), x.mean(), x.amax(1), x.argmax(1)),
        lambda x: x[torch.tensor([0, 7, 3, 3])] * 2,
        lambda x: x.gather(0, torch.tensor([[0, 7, 3]])) + 1,
        lambda x: (x.float() * 3).to(x.dtype).float() - x.float() * 3,  # the user's cast must round
        lambda x: x.to(torch.int32),
    ],
)
def test_single_ops_in_low_precision_equal_eager(function, dtype):
    same(function, torch.randn(8, 33).to(dtype))


@LOW
def test_a_fused_chain_in_low_precision_is_no_worse_than_eager(dtype):
    def function(x):
        return F.gelu((x + 1) * 3 - x).sum(0), ((x + 1).float() - x).mean()

    x = torch.randn(64, 33).to(dtype)
    exact = function(x.double())
    for ours, eager, true in zip(compiled(function)(x), function(x), exact, strict=True):
        assert ours.dtype == eager.dtype
        assert (ours - true).abs().max() <= 1.1 * (eager - true).abs().max() + 1e-6


def test_copysign_of_integers_is_a_float():
    same(torch.copysign, torch.tensor([1, -2, 3]), torch.tensor([-1, 1, -5]))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_is_converted_in_kernels(dtype):
    x = torch.randn(8, 33, dtype=torch.bfloat16)
    largest = torch.finfo(dtype).max

    def quantized(x):
        scale = largest / x.abs().amax(-1, keepdim=True).float().clamp(min=1e-12)
        short = (x.float() * scale).clamp(-largest, largest).to(dtype)
        return short.float(), short.t().contiguous().to(torch.bfloat16), scale  # assert_close does not support float8

    counters["overlapc"].clear()
    same(quantized, x)
    assert counters["overlapc"]["fallbacks"] == 0
    same(lambda x: torch.cat([x.to(dtype), x.to(dtype)]).view(torch.uint8), x)  # copies keep the bits


def test_zero_tensors_without_memory_are_zeros():
    """Forward-mode AD returns them where nothing depends on the input; they have no memory that kernels could read."""
    same(lambda x: (torch._efficientzerotensor(5) + x, torch._efficientzerotensor(5) * x.sum()), torch.arange(5.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_terms_summed_in_low_precision_are_rounded_first(dtype, generator):
    x = torch.randn(40, 9, generator=torch.Generator().manual_seed(0))

    def function(x):
        return x.cumsum(0, dtype=dtype), x[:4].cumprod(0, dtype=dtype), x.sum(0, dtype=dtype), x.mean(1, dtype=dtype)

    for given in (x, x.double(), torch.arange(1000, 1300)[:, None]):  # bfloat16 cannot represent all integers above 256
        same(function, given, rtol=0, atol=0)


def test_on_a_gpu_a_tensor_is_multiplied_by_the_inverse_of_a_number():
    """As in eager on GPUs. The inverse of 448, which is not a power of two, is rounded: the last bit shows which."""
    with FakeTensorMode():
        traced = make_fx(lambda x, y: (x / 448, y / 3.0, x / y))(
            torch.empty(8, device="cuda"), torch.empty(8, device="cuda", dtype=torch.float64)
        )
    graph = lower(traced, "graph")
    first, second, third = (operation.body.stores[0].value for operation in graph.ops)
    assert first.args[1].number == (torch.tensor(1.0) / torch.tensor(448.0)).item()
    assert second.args[1].number == 1 / 3
    assert [value.name for value in (first, second, third)] == ["mul", "mul", "div"]


def test_a_number_on_the_cpu_is_a_constant_of_a_kernel_for_a_gpu():
    def function(x):
        scaled = x * torch.tensor(0.1) / torch.tensor(3.0)
        kept = scaled.masked_fill(x >= torch.tensor(2), torch.tensor(-1.0))
        return kept + torch.tensor(7), x.double() / torch.tensor(3.0, dtype=torch.float64)

    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.empty(8, device="cuda", dtype=torch.bfloat16)
        traced = make_fx(function, decomposition_table=decompositions())(x)
    graph = lower(traced, "graph")
    kernels = [each for each in graph.ops if each.device.type == "cuda"]
    assert {type(each) for each in kernels} == {Loops}
    on_cpu = {each.name for each in graph.ops} - {each.name for each in kernels}
    assert on_cpu  # the ops that make the numbers are still there, but no kernel reads them
    assert not any(load.buffer in on_cpu for each in kernels for load in each.body.loads())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_bounds_of_hardtanh_are_not_rounded_to_low_precision(dtype):
    x = torch.tensor([0.93, -1.07, 0.9, 0.95, -1.0, -1.1]).to(dtype)  # 0.93 is 0.9297 in bfloat16: between the bounds

    def function(x):
        return torch.func.grad(lambda x: F.hardtanh(x, -1.07, 0.93).sum())(x)

    same(function, x, rtol=0, atol=0)


def test_addcdiv_of_float32_does_not_round_a_low_precision_quotient():
    x, a = torch.randn(50), torch.randn(50).bfloat16()

    def function(x, a):
        added = torch.addcdiv(x, a, a.abs() + 1, value=2)
        return added, torch.add(x, torch.mul(torch.div(a, a + 3), 2))

    for found, expected in zip(compiled(function)(x, a), function(x, a), strict=True):
        assert torch.equal(found, expected)
    without_source = eval(compile("lambda x, a: torch.addcdiv(x, a, a + 3, value=2)", "made", "eval"), {"torch": torch})
    assert torch.equal(compiled(without_source)(x, a), without_source(x, a))


@pytest.mark.parametrize(
    "source",
    [
        'torch.add(x, torch.mul(torch.div(a, x, rounding_mode="floor"), 2.0))',
        "torch.add(x, torch.mul(torch.div(a, 2.0), 0.5))",
        "torch.add(x, torch.mul(torch.div(a.int(), x.int().abs() + 1), 0.5))",
        "torch.add(1.0, torch.mul(torch.div(a, x), 0.5))",
    ],
)
def test_sums_of_code_without_source_that_are_no_addcdiv_are_left_alone(source: str):
    function = eval(compile(f"lambda x, a: {source}", "made", "eval"), {"torch": torch})
    same(function, torch.randn(50), torch.randn(50) * 5)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_the_gradient_of_smooth_l1_loss_is_nan_where_the_difference_is(reduction):
    def gradient(x, y):
        loss = F.smooth_l1_loss(x, y, reduction=reduction, beta=0.5)
        return torch.autograd.grad(loss.sum(), x)[0]

    y = torch.tensor([0.0, -1.0, math.inf, math.nan, 3.0, 0.25])
    x = torch.tensor([0.0, 2.0, math.inf, 1.0, 2.75, 0.75], requires_grad=True)
    torch._dynamo.reset()
    found = torch.compile(gradient, backend="overlapc")(x, y)
    torch.testing.assert_close(found, gradient(x, y), equal_nan=True)


@pytest.mark.parametrize("eps", [None, 0.1])
def test_the_gradient_of_logit_is_nan_where_its_input_is(eps):
    x = torch.tensor([0.0, 0.3, math.nan, 1.0, 2.0]).repeat(4).requires_grad_()

    def function(x):
        return torch.logit(x, eps)

    found, expected = (torch.autograd.grad(call(x).sum(), x)[0] for call in (compiled(function), function))
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_the_gradient_of_softshrink_is_zero_between_its_bounds():
    x = torch.tensor([-2.0, -0.5, -0.3, -0.0, 0.0, 0.2, 1.5, float("nan")]).repeat(2)  # fills eager's vector loop

    def function(x):
        shrunk = F.softshrink(x)
        return shrunk.abs().sqrt(), torch.copysign(torch.ones_like(shrunk), shrunk)

    same(function, x)
    eager, ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    function(eager)[0].sum().backward()
    compiled(function)(ours)[0].sum().backward()
    known = ~x.isnan()  # at NaN eager's gradient depends on the position
    torch.testing.assert_close(ours.grad[known], eager.grad[known])


@pytest.mark.parametrize(
    "place",
    [
        lambda x: (x > 0).long(),
        lambda x: (x > 0).float().long() + 1,
        lambda x: torch.where(x > 0, 5, 1),
        lambda x: ((x > 0).long() + 1).remainder(6),
    ],
)
def test_an_index_may_be_computed_from_a_condition(place):
    """GCC 12 miscompiles a vectorized gather with indices computed from a condition: it reads at -1 instead of 1."""
    same(lambda table, x: table.take(place(x)), torch.randn(6), torch.randn(64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_product_and_its_sum_are_rounded_once_where_eager_does_so(dtype: torch.dtype):
    def function(x, a, b):
        yield torch.addcmul(x, a, b)
        yield torch.addcmul(x, a, b, value=0.3)
        yield from (torch.lerp(x, a, weight) for weight in (0.3, 0.7, -0.7))
        yield torch.lerp(x, a, b)
        yield from torch._foreach_addcmul([x], [a], [b], 0.3)
        yield torch.add(x, a, alpha=0.75)
        yield torch.sub(x, a, alpha=0.75)
        yield torch.rsub(x, a, alpha=0.75)

    generator = torch.Generator().manual_seed(0)
    # A multiple of every vector length: eager rounds the product to low precision, too, in what remains behind vectors.
    given = [torch.randn(4096, dtype=torch.float64, generator=generator).to(dtype) for _ in range(3)]
    found = torch.compile(lambda *given: list(function(*given)), backend="overlapc")(*given)
    for ours, eager in zip(found, function(*given), strict=True):
        assert torch.equal(ours, eager)
