"""Every operation and reduction of the loop IR in C++ equals eager torch, over values that are error-prone."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from overlapc.ir.body import OPERATIONS, REDUCTIONS, Body, Cast, Constant, Load, Reduce, Store, Value, op
from tests.codegen.cpp_kernels import Kernels
from tests.codegen.terms import loop, p0, r0, s0, s1

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
ALL = (*FLOATS, *INTEGERS, torch.bool)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)  # formats that are only converted
CONVERTED = (*ALL, *FLOAT8)

# The largest error of a vector math function is 4 units in the last place; half a unit more if a result of lower
# precision is rounded from float32.
TOLERANCE = {
    torch.float32: {"rtol": 1e-6, "atol": 1e-37},
    torch.float64: {"rtol": 2e-15, "atol": 1e-300},
    torch.bfloat16: {"rtol": 8e-3, "atol": 1e-37},
    torch.float16: {"rtol": 1e-3, "atol": 1e-7},
}
# Exact on IEEE hardware and in eager: no tolerance.
EXACT = frozenset(
    "neg abs sign signbit reciprocal sqrt relu floor ceil trunc round isnan isinf logical_not bitwise_not "
    "add sub mul div floor_div trunc_div remainder fmod copysign nextafter maximum minimum where".split()
)

UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "bitwise_not": torch.bitwise_not,
    "isinf": torch.isinf,
    "isnan": torch.isnan,
    "logical_not": torch.logical_not,
    "relu": F.relu,
    **{
        name: getattr(torch, name)
        for name in (
            "neg abs sign signbit reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos "
            "atan sinh cosh tanh asinh acosh atanh erf erfc lgamma sigmoid floor ceil trunc round"
        ).split()
    },
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "floor_div": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    **{
        name: getattr(torch, name)
        for name in (
            "add sub mul div remainder fmod pow atan2 hypot copysign nextafter maximum minimum eq ne lt le gt ge "
            "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor"
        ).split()
    },
}
# Where eager on CPU is not exact (sqrt of float32 is sometimes off by one bit, fmod by a subnormal is NaN).
C_LIBRARY = {"sqrt": np.sqrt, "fmod": np.fmod, "remainder": np.remainder}
INT_UNARY = "neg abs sign signbit relu floor ceil trunc round logical_not bitwise_not".split()
INT_BINARY = (
    "add sub mul floor_div trunc_div remainder fmod pow maximum minimum eq ne lt le gt ge logical_and logical_or "
    "logical_xor bitwise_and bitwise_or bitwise_xor shift_left shift_right"
).split()
BOOL_UNARY = ["logical_not", "bitwise_not"]
BOOL_BINARY = (
    "add mul eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor maximum minimum"
).split()
SCALAR_ONLY = ("lgamma", "nextafter")  # not vectorized, so these are in another kernel than the other operations


def test_the_tables_cover_the_ir():
    assert set(UNARY) | set(BINARY) | {"where", "bitcast", "random", "random_word", "fma"} == set(OPERATIONS)
    assert set(REDUCTIONS) == {"sum", "prod", "max", "min", "any", "all", "argmax", "argmin", "dot"}


def operations_of(dtype: torch.dtype, arity: int) -> list[str]:
    if dtype.is_floating_point:
        names = list(UNARY if arity == 1 else BINARY)
        without = {"bitwise_not", "bitwise_and", "bitwise_or", "bitwise_xor", "shift_left", "shift_right"}
        if dtype in (torch.bfloat16, torch.float16):
            without |= {"nextafter"}  # a neighbour in float32 is no neighbour in bfloat16
        return [name for name in names if name not in without]
    if dtype == torch.bool:
        return BOOL_UNARY if arity == 1 else BOOL_BINARY
    return INT_UNARY if arity == 1 else INT_BINARY


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all pairs of special values, followed by 1,000 pairs of ordinary ones."""
    if dtype.is_floating_point:
        info = torch.finfo(dtype)
        special = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 1e-3, 100.0, -100.0, info.max]
        special += [info.min, info.tiny, info.tiny / 4, math.inf, -math.inf, math.nan, 7.25, -0.7]
        one = torch.tensor(special, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        more = torch.randn(2, 1000, generator=generator).mul_(4).to(dtype)
    elif dtype == torch.bool:
        one = torch.tensor([False, True])
        more = (torch.arange(2000) % 3 == 0).reshape(2, 1000)
    else:
        info = torch.iinfo(dtype)
        one = torch.tensor(
            sorted({0, 1, 2, 3, 7, 63, 64, info.max, info.max - 1} | ({-1, -2, -7} if info.min else set()))
        )
        one = one.to(dtype)
        generator = torch.Generator().manual_seed(0)
        more = torch.randint(max(info.min, -1000), min(info.max, 1000), (2, 1000), generator=generator).to(dtype)
    left, right = torch.cartesian_prod(one, one).unbind(1)
    return torch.cat([left, more[0]]), torch.cat([right, more[1]])


def result_dtype(name: str, value: Value, dtype: torch.dtype) -> torch.dtype:
    return torch.bool if value.dtype == torch.bool else dtype


def elementwise(dtype: torch.dtype, names: list[str]) -> Body:
    """Return a body that applies every operation to the same two operands."""
    a, b = Load("a", p0, dtype), Load("b", p0, dtype)
    stores = []
    for name in names:
        value = op(name, *(a, b)[: OPERATIONS[name]])
        stores.append(Store(name, p0, value, result_dtype(name, value, dtype)))
    return Body((loop(p0, s0),), (), tuple(stores))


def casts(source: torch.dtype) -> Body:
    """Return a body that converts `source` to every dtype, stored as that dtype and, rounded to it, as float64."""
    a = Load("a", p0, source)
    stores = [Store(f"to_{to}", p0, a, to) for to in CONVERTED]
    stores += [Store(f"via_{to}", p0, Cast(a, to), torch.float64) for to in CONVERTED]
    return Body((loop(p0, s0),), (), tuple(stores))


def where(dtype: torch.dtype) -> Body:
    a, b, c = Load("a", p0, dtype), Load("b", p0, dtype), Load("c", p0, torch.bool)
    return Body((loop(p0, s0),), (), (Store("y", p0, op("where", c, a, b), dtype),))


def reductions_of(dtype: torch.dtype) -> list[tuple[str, torch.dtype]]:
    """Return the pairs (kind, dtype of the result) for sources of `dtype`."""
    if dtype == torch.bool:
        return [("any", torch.bool), ("all", torch.bool), ("sum", torch.int64)]
    total = torch.int64 if not dtype.is_floating_point else dtype
    return [
        ("sum", total),
        ("prod", total),
        ("max", dtype),
        ("min", dtype),
        ("any", torch.bool),
        ("all", torch.bool),
    ]


def reduction(dtype: torch.dtype, layout: str, kinds: list[tuple[str, torch.dtype]]) -> Body:
    """Return a body with reductions of an s0 x s1 matrix along rows or columns, or of the whole matrix."""
    outer, inner = {
        "rows": ((loop(p0, s0),), (loop(r0, s1),)),
        "columns": ((loop(p0, s1),), (loop(r0, s0),)),
        "full": ((), (loop(r0, s0 * s1),)),
    }[layout]
    index = {"rows": s1 * p0 + r0, "columns": s1 * r0 + p0, "full": r0}[layout]
    x = Load("x", index, dtype)
    stores = []
    for kind, result in kinds:
        arg: Value = x
        if kind in ("any", "all"):
            arg = op("ne", x, Constant(0, x.dtype)) if dtype != torch.bool else x
        computed = torch.float32 if result in (torch.bfloat16, torch.float16) else result
        if kind in ("sum", "prod") and x.dtype != computed:
            arg = Cast(x, computed)
        place = p0 if outer else p0 * 0
        stores.append(Store(kind, place, Reduce(kind, arg, computed), result))
    return Body(outer, inner, tuple(stores))


LAYOUTS = ("rows", "columns", "full")
ARG = [("argmax", torch.int64), ("argmin", torch.int64)]
BODIES: dict[str, Body] = {
    **{
        f"ops_{dtype}_{part}": elementwise(
            dtype,
            [n for arity in (1, 2) for n in operations_of(dtype, arity) if (n in SCALAR_ONLY) == (part == "scalar")],
        )
        for dtype in ALL
        for part in ("simd", "scalar")
        if part == "simd" or dtype in FLOATS
    },
    **{f"casts_{dtype}": casts(dtype) for dtype in CONVERTED},
    **{f"where_{dtype}": where(dtype) for dtype in ALL},
    **{
        f"reduce_{dtype}_{layout}": reduction(dtype, layout, reductions_of(dtype))
        for dtype in ALL
        for layout in LAYOUTS
        if layout != "full" or dtype in (torch.float32, torch.float64, torch.int64, torch.bool)
    },
    **{
        f"arg_{dtype}_{layout}": reduction(dtype, layout, ARG)
        for dtype in (torch.float32, torch.int32)
        for layout in LAYOUTS
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def results(kernels: Kernels) -> dict[torch.dtype, dict[str, torch.Tensor]]:
    """Run every operation on `operands(dtype)`; return the tensors by dtype and operation."""
    found: dict[torch.dtype, dict[str, torch.Tensor]] = {}
    for dtype in ALL:
        a, b = operands(dtype)
        tensors = {"a": a, "b": b}
        for part in ("simd", "scalar"):
            body = BODIES.get(f"ops_{dtype}_{part}")
            if body is None:
                continue
            for store in body.stores:
                tensors[store.buffer] = torch.empty(len(a), dtype=store.memory_dtype)
            kernels.run(f"ops_{dtype}_{part}", tensors, s0=len(a))
        found[dtype] = tensors
    return found


def assert_like(actual: torch.Tensor, expected: torch.Tensor, exact: bool, dtype: torch.dtype) -> None:
    tolerance = {"rtol": 0, "atol": 0} if exact or not dtype.is_floating_point else TOLERANCE[dtype]
    torch.testing.assert_close(actual, expected, equal_nan=True, **tolerance)


CASES = [(dtype, name) for dtype in ALL for arity in (1, 2) for name in operations_of(dtype, arity)]


@pytest.mark.parametrize(
    ("dtype", "name"), CASES, ids=[f"{name}-{dtype}".replace("torch.", "") for dtype, name in CASES]
)
def test_an_operation_equals_eager(results: dict[torch.dtype, dict[str, torch.Tensor]], dtype: torch.dtype, name: str):
    tensors = results[dtype]
    args = [tensors["a"], tensors["b"]][: OPERATIONS[name]]
    actual = tensors[name]
    if name in ("floor_div", "trunc_div", "remainder", "fmod") and not dtype.is_floating_point:
        keep = args[1] != 0  # eager raises there
        args, actual = [arg[keep] for arg in args], actual[keep]
    low = dtype in (torch.bfloat16, torch.float16)
    args = [arg.float() if low else arg for arg in args]
    if name in C_LIBRARY and dtype.is_floating_point:
        with np.errstate(all="ignore"):
            expected = torch.from_numpy(C_LIBRARY[name](*(arg.numpy() for arg in args)))
    else:
        expected = {**UNARY, **BINARY}[name](*args)
    if low and expected.is_floating_point():
        expected = expected.to(dtype)
    exact = name in EXACT or expected.dtype == torch.bool
    assert_like(actual, expected.to(actual.dtype), exact, actual.dtype)
    if name in ("neg", "copysign", "floor", "round"):
        numbers = ~expected.isnan()
        assert torch.equal(torch.signbit(actual)[numbers], torch.signbit(expected)[numbers])


def test_own_exp_and_erf_are_within_two_units_in_the_last_place(kernels: Kernels):
    """Tested on every 4099th float of either sign; below the smallest normal number, the unit is that number's."""
    bits = torch.arange(0, 0x7F800000, 4099, dtype=torch.int64).to(torch.int32)
    a = torch.cat([bits, bits - 2**31]).view(torch.float32)
    found = {
        store.buffer: torch.empty(len(a), dtype=store.memory_dtype) for store in BODIES["ops_torch.float32_simd"].stores
    }
    kernels.run("ops_torch.float32_simd", {"a": a, "b": torch.ones_like(a), **found}, s0=len(a))
    for name in ("exp", "erf"):
        exact = UNARY[name](a.double())
        finite = exact.abs() < torch.finfo(torch.float32).max
        unit = torch.exp2(torch.frexp(exact)[1].double().clamp(min=-125) - 24)
        assert ((found[name].double() - exact).abs() / unit)[finite].max() < 2, name
        assert torch.equal(found[name][~finite].double(), exact[~finite].sign() * math.inf)
    assert torch.equal(found["erf"][a.abs() > 4], a[a.abs() > 4].sign())


def test_dividing_integers_by_zero_does_not_end_the_process(
    results: dict[torch.dtype, dict[str, torch.Tensor]],
):
    tensors = results[torch.int32]
    zero = tensors["b"] == 0
    assert zero.any()
    assert (tensors["trunc_div"][zero] == -1).all()


def converted(kernels: Kernels, a: torch.Tensor) -> dict[str, torch.Tensor]:
    """Convert `a` to every format: `to_torch.float16` has that dtype, `via_torch.float16` is float64 rounded to it."""
    tensors = {"a": a}
    for store in BODIES[f"casts_{a.dtype}"].stores:
        tensors[store.buffer] = torch.empty(len(a), dtype=store.memory_dtype)
    kernels.run(f"casts_{a.dtype}", tensors, s0=len(a))
    return tensors


def assert_equal(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.dtype == expected.dtype
    if actual.dtype in FLOAT8:
        actual, expected = actual.float(), expected.float()
    torch.testing.assert_close(actual, expected, equal_nan=True, rtol=0, atol=0)


@pytest.mark.parametrize("source", ALL, ids=str)
def test_casts_equal_eager(kernels: Kernels, source: torch.dtype):
    a = operands(source)[0]
    if source.is_floating_point:
        a = torch.cat([a, torch.linspace(-1, 1, 4097).to(source), torch.randn(5000).mul_(1e-6).to(source)])
    tensors = converted(kernels, a)
    for to in CONVERTED:
        keep = torch.ones(len(a), dtype=torch.bool)
        if source.is_floating_point and not to.is_floating_point and to != torch.bool:
            keep = a.double().abs() < (127 if to != torch.uint8 else 255)  # undefined in C++ beyond
            keep &= (a >= 0) | (to != torch.uint8)
        expected = a.to(to)
        assert_equal(tensors[f"to_{to}"][keep], expected[keep])
        assert_equal(tensors[f"via_{to}"][keep], expected.double()[keep])


def every_number(dtype: torch.dtype) -> torch.Tensor:
    """Return every bit pattern of a format of one or two bytes."""
    count, unsigned = (65536, torch.uint16) if dtype.itemsize == 2 else (256, torch.uint8)
    return torch.arange(count, dtype=torch.int32).to(unsigned).view(dtype)


SHORT = (torch.bfloat16, torch.float16, *FLOAT8)


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_conversions_from_every_number_of_a_short_format_are_exact(kernels: Kernels, dtype: torch.dtype):
    a = every_number(dtype)
    tensors = converted(kernels, a)
    for to in (*FLOATS, *FLOAT8):
        assert_equal(tensors[f"to_{to}"], a.to(to))


@pytest.mark.parametrize("dtype", SHORT, ids=str)
def test_rounding_to_low_precision_is_to_nearest_even(kernels: Kernels, dtype: torch.dtype):
    bits = every_number(dtype).float().view(torch.int32)
    a = torch.cat([bits + step for step in (-1, 0, 1)])
    middle = (bits[:-1].long() + bits[1:].long()).div(2, rounding_mode="floor").int()  # halfway between neighbours
    a = torch.cat([a, middle - 1, middle, middle + 1]).view(torch.float32)
    assert_equal(converted(kernels, a)[f"to_{dtype}"], a.to(dtype))


@pytest.mark.parametrize("dtype", ALL, ids=str)
def test_where_equals_eager(kernels: Kernels, dtype: torch.dtype):
    a, b = operands(dtype)
    c = torch.arange(len(a)) % 3 == 0
    y = torch.empty_like(a)
    kernels.run(f"where_{dtype}", {"a": a, "b": b, "c": c, "y": y}, s0=len(a))
    torch.testing.assert_close(y, torch.where(c, a, b), equal_nan=True, rtol=0, atol=0)


SIZES = [(1, 1), (7, 17), (17, 7), (3, 1000), (300, 130), (2, 5000)]


def matrix(dtype: torch.dtype, rows: int, columns: int, special: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * columns)
    if dtype.is_floating_point:
        x = torch.randn(rows, columns, generator=generator).to(dtype)
        if special:
            flat = x.view(-1)
            for at, value in enumerate((math.nan, math.inf, -math.inf, -math.nan, -0.0, 0.0)):
                flat[(at * 37 + 5) % len(flat)] = value
        return x
    if dtype == torch.bool:
        return torch.rand(rows, columns, generator=generator) > (0.5 if special else 0.001)
    return torch.randint(0, 9, (rows, columns), generator=generator).to(dtype)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("special", [False, True], ids=["ordinary", "special"])
@pytest.mark.parametrize(
    ("dtype", "layout"),
    [(dtype, layout) for dtype in ALL for layout in LAYOUTS if f"reduce_{dtype}_{layout}" in BODIES],
    ids=str,
)
def test_reductions_equal_eager(
    kernels: Kernels, dtype: torch.dtype, layout: str, special: bool, size: tuple[int, int]
):
    name = f"reduce_{dtype}_{layout}"
    x = matrix(dtype, *size, special)
    shape = {"rows": size[0], "columns": size[1], "full": 1}[layout]
    tensors = {"x": x}
    for store in BODIES[name].stores:
        tensors[store.buffer] = torch.empty(shape, dtype=store.memory_dtype)
    kernels.run(name, tensors, s0=size[0], s1=size[1])
    dim = {"rows": 1, "columns": 0, "full": 0}[layout]
    source = x.reshape(-1) if layout == "full" else x
    wide = source.double() if dtype.is_floating_point else source
    for store in BODIES[name].stores:
        kind = store.buffer
        if kind in ("sum", "prod"):
            expected = getattr(wide, kind)(dim)
        elif kind in ("any", "all"):
            expected = getattr(source != 0, kind)(dim)
        else:
            expected = getattr(source, f"a{kind}")(dim)
        expected = expected.to(store.memory_dtype).reshape(shape)
        tolerance = {"rtol": 0.0, "atol": 0.0}
        if dtype.is_floating_point and kind in ("sum", "prod"):
            tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).tiny}
            if kind == "prod":
                tolerance["rtol"] += source.shape[dim] * 6e-8  # one rounding per factor
            else:  # relative to the sum of magnitudes, because terms can cancel
                tolerance["atol"] += 2e-7 * float(wide.nan_to_num(0, 0, 0).abs().sum(dim).max())
        torch.testing.assert_close(tensors[kind], expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("special", [False, True], ids=["ordinary", "special"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int32], ids=str)
def test_argmax_and_argmin_give_the_first_position(
    kernels: Kernels, dtype: torch.dtype, layout: str, special: bool, size: tuple[int, int]
):
    x = matrix(dtype, *size, special)
    shape = {"rows": size[0], "columns": size[1], "full": 1}[layout]
    tensors = {"x": x, **{kind: torch.empty(shape, dtype=torch.int64) for kind, _ in ARG}}
    kernels.run(f"arg_{dtype}_{layout}", tensors, s0=size[0], s1=size[1])
    source, dim = (x.reshape(-1), 0) if layout == "full" else (x, 1 if layout == "rows" else 0)
    for kind, best in (("argmax", source.amax(dim)), ("argmin", source.amin(dim))):
        # The IR defines that ties give the first position; eager does not.
        wanted = best.unsqueeze(dim)
        equal = torch.where(wanted.isnan(), source.isnan(), source == wanted)
        expected = equal.to(torch.uint8).argmax(dim).reshape(shape)
        first = torch.where(equal, torch.arange(source.shape[dim]).reshape(-1, *[1] * (source.dim() - 1 - dim)), 10**9)
        assert (first.amin(dim).reshape(shape) <= expected).all()
        torch.testing.assert_close(tensors[kind], first.amin(dim).reshape(shape))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_argmax_and_argmin_of_equal_extreme_values_give_the_first_position(kernels: Kernels, layout: str, value: float):
    x = torch.full((3, 1000), value)
    shape = {"rows": 3, "columns": 1000, "full": 1}[layout]
    tensors = {"x": x, **{kind: torch.full((shape,), -1) for kind, _ in ARG}}
    kernels.run(f"arg_torch.float32_{layout}", tensors, s0=3, s1=1000)
    for kind, _ in ARG:
        assert (tensors[kind] == 0).all()
