"""Every operation of the loop IR over special values, one kernel per dtype and arity; for the interpreter and a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import sympy
import torch
import torch.nn.functional as F

from overlapc.ir.body import ATOMICS, Body, Cast, Constant, Index, Load, Store, Value, op
from overlapc.runtime import philox
from tests.codegen.case import Case, Tensors
from tests.codegen.terms import i0, loop, p0

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)


def _numpy(function: Callable[..., Any], eager: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return NumPy's exact `function` for CPU tensors, because torch's fmod on CPU is NaN for large quotients."""

    def call(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        if a.device.type != "cpu":
            return eager(a, b)
        with np.errstate(invalid="ignore"):
            return torch.from_numpy(function(a.numpy(), b.numpy()))

    return call


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": F.relu,
    **{
        name: getattr(torch, name)
        for name in (
            "neg abs sign signbit reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan "
            "sinh cosh tanh asinh acosh atanh erf erfc lgamma sigmoid floor ceil trunc round isnan isinf logical_not "
            "bitwise_not"
        ).split()
    },
}
BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "floor_div": lambda a, b: torch.div(a, b, rounding_mode="floor"),
    "trunc_div": lambda a, b: torch.div(a, b, rounding_mode="trunc"),
    "fmod": _numpy(np.fmod, torch.fmod),
    "remainder": _numpy(np.remainder, torch.remainder),
    "shift_left": torch.bitwise_left_shift,
    "shift_right": torch.bitwise_right_shift,
    **{
        name: getattr(torch, name)
        for name in (
            "add sub mul div pow atan2 hypot copysign nextafter maximum minimum eq ne lt le gt ge "
            "logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor"
        ).split()
    },
}
_INTEGER_ONLY = set("bitwise_not bitwise_and bitwise_or bitwise_xor shift_left shift_right".split())
_ANY = set(
    "neg abs sign signbit relu floor ceil trunc round isnan isinf logical_not add sub mul floor_div trunc_div "
    "remainder fmod pow maximum minimum eq ne lt le gt ge logical_and logical_or logical_xor".split()
)
_BOOL = set(
    "logical_not bitwise_not isnan isinf add mul eq ne lt le gt ge logical_and logical_or logical_xor bitwise_and "
    "bitwise_or bitwise_xor maximum minimum".split()
)
# Correctly rounded on IEEE hardware, or always exact: no tolerance (not sqrt: torch's is off by one bit on CPU).
EXACT = set(
    "neg abs sign signbit reciprocal relu floor ceil trunc round isnan isinf logical_not bitwise_not add sub mul "
    "div floor_div trunc_div remainder fmod copysign nextafter maximum minimum eq ne lt le gt ge logical_and "
    "logical_or logical_xor bitwise_and bitwise_or bitwise_xor shift_left shift_right".split()
)

_ANY_ZERO = {"relu", "remainder", "maximum", "minimum"}  # torch does not define the sign of a result of 0


def names_of(dtype: torch.dtype, arity: int) -> list[str]:
    """Return the operations of `arity` that torch has for `dtype`."""
    table = UNARY if arity == 1 else BINARY
    if dtype is torch.bool:
        return [name for name in table if name in _BOOL]
    if not dtype.is_floating_point:
        return [name for name in table if name in _ANY | _INTEGER_ONLY]
    without = _INTEGER_ONLY | (
        {"nextafter"} if dtype.itemsize == 2 else set()
    )  # a neighbour in float32 is no neighbour in 16 bits
    return [name for name in table if name not in without]


def operands(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all pairs of special values, followed by ordinary ones."""
    generator = torch.Generator().manual_seed(0)
    if dtype is torch.bool:
        special = torch.tensor([False, True])
        more = torch.rand(2, 60, generator=generator) < 0.5
    elif dtype.is_floating_point:
        info = torch.finfo(dtype)
        numbers = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, -3.0, 1e-3, 88.0, -88.0, 1000.0, info.max]
        numbers += [info.min, info.tiny, math.inf, -math.inf, math.nan, 7.25, -0.7]
        special = torch.tensor(numbers, dtype=dtype)
        more = torch.randn(2, 200, generator=generator).mul_(4).to(dtype)
    else:
        info = torch.iinfo(dtype)
        numbers = {0, 1, 2, 3, 7, 63, 64, info.max, info.max - 1} | ({-1, -2, -7, -64} if info.min else set())
        special = torch.tensor(sorted(numbers), dtype=torch.int64).to(dtype)
        low, high = max(info.min, -1000), min(info.max, 1000)
        more = torch.randint(low, high, (2, 100), generator=generator).to(dtype)
    left, right = torch.cartesian_prod(special, special).unbind(1)
    return torch.cat([left, more[0]]), torch.cat([right, more[1]])


def elementwise(dtype: torch.dtype, arity: int) -> Case:
    """Return a kernel that applies every operation of `arity` to the same operands."""
    names = names_of(dtype, arity)
    left, right = operands(dtype)
    if not dtype.is_floating_point:
        usable = (right != 0) & ((left != torch.iinfo(dtype).min) if dtype is not torch.bool else True)
        if dtype is not torch.bool and arity == 2:
            left, right = left[usable], right[usable]  # division by zero and overflowing division are undefined
    loads = (Load("a", p0, dtype), Load("b", p0, dtype))[:arity]
    values = {name: op(name, *loads) for name in names}

    def expected(t: Tensors) -> Tensors:
        args = [_widened(t[name]) for name in "ab"[:arity]]
        table = UNARY if arity == 1 else BINARY
        return {name: table[name](*args) if name in table else args[0] for name in names}

    given = dict(zip("ab"[:arity], (left, right), strict=False))
    return _applied(f"{'unary' if arity == 1 else 'binary'}_{str(dtype)[6:]}", values, dtype, given, expected)


def with_a_number(dtype: torch.dtype) -> Case:
    """Return a kernel that applies every operation of two operands to a tensor and the number 3, in both orders."""
    x = operands(dtype)[0]
    if not dtype.is_floating_point and dtype is not torch.bool:
        x = x[(x > 0) & (x < 64)]  # divides, and is a distance of a shift
    load = Load("a", p0, dtype)
    number = Constant(3, load.dtype)
    names = names_of(dtype, 2)
    values = {f"{name}_of_3": op(name, number, load) for name in names}
    values |= {f"{name}_with_3": op(name, load, number) for name in names}

    def expected(t: Tensors) -> Tensors:
        a = _widened(t["a"])
        three = torch.full_like(a, 3)
        results = {f"{name}_of_3": BINARY[name](three, a) for name in names}
        return results | {f"{name}_with_3": BINARY[name](a, three) for name in names}

    return _applied(f"number_{str(dtype)[6:]}", values, dtype, {"a": x}, expected)


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the dtype in which kernels compute."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _applied(
    name: str,
    values: dict[str, Value],
    dtype: torch.dtype,
    given: dict[str, torch.Tensor],
    expected: Callable[[Tensors], Tensors],
) -> Case:
    """Return a kernel that stores each of `values`, of `dtype` or bool, for every element of the given tensors."""
    count = given["a"].numel()
    memory = {result: torch.bool if value.dtype is torch.bool else dtype for result, value in values.items()}
    stores = tuple(Store(result, p0, value, memory[result]) for result, value in values.items())
    tensors = given | {result: torch.zeros(count, dtype=memory[result]) for result in values}
    return _Elementwise(name, Body((loop(p0, count),), (), stores), tensors, expected)


class _Elementwise(Case):
    """A case that compares every element relative to itself, because functions are off by units in the last place."""

    def problem(self, name, got, want, inputs):
        operands = [inputs[key].tensor for key in ("a", "b") if key in inputs]
        operation = name.removesuffix("_of_3").removesuffix("_with_3")
        return _elements_off(got, want.to(got.dtype), operation, operands)


# Three units in the last place of the computing precision; one unit if the result is rounded to a lower precision.
_RELATIVE = {torch.float32: 4e-7, torch.float64: 1e-15, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def _elements_off(got: torch.Tensor, want: torch.Tensor, operation: str, inputs: list[torch.Tensor]) -> str:
    if not got.dtype.is_floating_point:
        wrong = got != want
    else:
        same = (got == want) | (got.isnan() & want.isnan())
        relative = 0.0 if operation in EXACT else _RELATIVE[got.dtype]
        # Subnormal results may be flushed to zero.
        allowed = relative * want.double().abs() + torch.finfo(got.dtype).tiny
        wrong = ~(same | ((got.double() - want.double()).abs() <= allowed))
        if operation in EXACT - _ANY_ZERO:
            wrong |= (got == 0) & (want == 0) & (got.signbit() != want.signbit())
    if not wrong.any():
        return ""
    at = int(wrong.nonzero()[0])
    shown = ", ".join(str(tensor[at].item()) for tensor in inputs)
    return f"{int(wrong.sum())} of {wrong.numel()} differ; f({shown}) = {got[at].item()!r}, want {want[at].item()!r}"


def casts(source: torch.dtype) -> Case:
    """Return a kernel that casts `source` to every dtype for which torch defines the result, and stores it."""
    if source is torch.bool:
        x = torch.tensor([False, True])
    elif source.is_floating_point:
        x = torch.tensor([0.0, -0.0, 1.5, 2.5, -1.5, 100.0, 3.14159, 0.1, -0.3, 60000.0]).to(source)
    else:
        x = torch.tensor([0, 1, 2, 100, torch.iinfo(source).max, 127]).to(source)
    stores, tensors, wide = [], {"x": x}, x
    value = Load("x", p0, source)
    targets = [to for to in DTYPES if not (source.is_floating_point and not to.is_floating_point and to.itemsize < 4)]
    for to in targets:
        name = f"to_{str(to)[6:]}"
        stores.append(Store(name, p0, Cast(value, to), to))
        tensors[name] = torch.zeros(wide.numel(), dtype=to)

    def expected(t: Tensors) -> Tensors:
        return {f"to_{str(to)[6:]}": t["x"].to(to) for to in targets}

    body = Body((loop(p0, wide.numel()),), (), tuple(stores))
    return Case(f"casts_{str(source)[6:]}", body, tensors, expected, tolerance=0.0)


def where_and_constants() -> Case:
    """Return a kernel with `where`, constants that are not finite, and a stored bool of a comparison."""
    x, whole = Load("x", p0, torch.float32), Load("whole", p0, torch.float32)
    positive = op("gt", x, Constant(0.0, torch.float32))
    parts: dict[str, tuple[Value, torch.dtype]] = {
        "y": (op("where", positive, x, Constant(-math.inf, torch.float32)), torch.float32),
        "z": (op("where", positive, Constant(math.nan, torch.float32), Constant(-0.0, torch.float32)), torch.float32),
        "wide": (op("add", Cast(x, torch.float64), Constant(0.1, torch.float64)), torch.float64),
        "huge": (op("add", Cast(whole, torch.int64), Constant(2**40 + 1, torch.int64)), torch.int64),
        "flag": (op("logical_and", positive, Constant(True, torch.bool)), torch.bool),
        "constant": (Constant(2.5, torch.float32), torch.bfloat16),
    }
    stores = tuple(Store(name, p0, value, dtype) for name, (value, dtype) in parts.items())
    tensors = {name: torch.zeros(6, dtype=dtype) for name, (_, dtype) in parts.items()}
    tensors["x"] = torch.tensor([1.0, -1.0, -0.0, math.nan, math.inf, -math.inf])
    tensors["whole"] = torch.tensor([1.0, -1.0, 0.0, 2.0, 7.0, 3.25])  # C leaves a NaN's integer undefined

    def expected(t: Tensors) -> Tensors:
        x_ = t["x"]
        return {
            "y": torch.where(x_ > 0, x_, -math.inf),
            "z": torch.where(x_ > 0, math.nan, -0.0),
            "wide": x_.double() + 0.1,
            "huge": t["whole"].long() + 2**40 + 1,
            "flag": x_ > 0,
            "constant": torch.full_like(x_, 2.5),
        }

    return Case("where_and_constants", Body((loop(p0, 6),), (), stores), tensors, expected, tolerance=0.0)


def random_numbers() -> Case:
    """Return a kernel of Philox words and numbers, also beyond 32-bit positions, bitwise equal to runtime/philox.py."""
    count, far = 1000, 2**36 + 5
    seed = [Load("seed", sympy.Integer(at), torch.int64) for at in range(2)]
    positions = {"near": p0, "later": p0 + far + 3, "odd": p0 + 7, "far": 3 * p0 + far}  # the first two in blocks
    names = ("random", "random_word")
    stores, tensors = [], {"seed": torch.tensor([-(2**62) + 12345, 2**61 + 987654321])}
    for place, position in positions.items():
        for name in names:
            dtype = torch.float32 if name == "random" else torch.int64
            value = op(name, *seed, Index(position), dtype=dtype)
            stores.append(Store(f"{name}_{place}", p0, value, dtype))
            tensors[f"{name}_{place}"] = torch.zeros(count, dtype=dtype)

    def expected(t: Tensors) -> Tensors:
        at = torch.arange(count, device=t["seed"].device)
        where = {"near": at, "later": at + far + 3, "odd": at + 7, "far": 3 * at + far}
        found = {place: philox.words(t["seed"], each) for place, each in where.items()}
        words = {f"random_word_{place}": word for place, word in found.items()}
        return words | {f"random_{place}": (word >> 8).float() * 2.0**-24 for place, word in found.items()}

    return Case("random_numbers", Body((loop(p0, count),), (), tuple(stores)), tensors, expected, tolerance=0.0)


def bitcasts() -> Case:
    """Return a kernel that reads the bits of floats as integers and back."""
    stores, tensors = [], {}
    pairs = [(torch.float32, torch.int32), (torch.float64, torch.int64)]
    for wide, bits in pairs:
        numbers = torch.tensor([0.0, -0.0, 1.5, -3.25, math.inf, -math.inf, 1e-40], dtype=wide)
        tensors |= {f"x_{bits}": numbers, f"bits_{bits}": numbers.view(bits) * 0, f"back_{bits}": numbers * 0}
        value = op("bitcast", Load(f"x_{bits}", p0, wide), dtype=bits)
        turned = op("bitwise_xor", value, Constant(torch.iinfo(bits).min, bits))
        stores += [
            Store(f"bits_{bits}", p0, value, bits),
            Store(f"back_{bits}", p0, op("bitcast", turned, dtype=wide), wide),
        ]

    def expected(t: Tensors) -> Tensors:
        found = {}
        for _, bits in pairs:
            found |= {f"bits_{bits}": t[f"x_{bits}"].view(bits), f"back_{bits}": -t[f"x_{bits}"]}
        return found

    return Case("bitcasts", Body((loop(p0, 7),), (), tuple(stores)), tensors, expected, tolerance=0.0)


def atomics() -> Case:
    """Return a kernel with every masked atomic store (add, max, min)."""
    count, places = 600, 7
    generator = torch.Generator().manual_seed(11)
    where = Load("where", p0, torch.int64)
    mask = op("ne", where, Constant(3, torch.int64))
    dtypes = [torch.int32, torch.int64, torch.float32, torch.float64]
    stores: list[Store] = []
    tensors: Tensors = {"where": torch.randint(places, (count,), generator=generator)}
    for dtype in dtypes:
        tensors[f"x_{dtype}"] = torch.randint(-1000, 1000, (count,), generator=generator).to(dtype)
        for mode in ATOMICS if not dtype.is_floating_point else ("add",):
            name = f"{mode}_{dtype}"
            tensors[name] = torch.full((places,), 5).to(dtype)
            stores.append(Store(name, i0, Load(f"x_{dtype}", p0, dtype), dtype, mode, mask, ((i0, where),)))

    def expected(t: Tensors) -> Tensors:
        kept = t["where"] != 3
        found = {}
        for store in stores:
            reduce = {"add": "sum", "max": "amax", "min": "amin"}[store.mode]
            source = t[f"x_{store.memory_dtype}"][kept]
            found[store.buffer] = t[store.buffer].scatter_reduce(0, t["where"][kept], source, reduce)
        return found

    return Case("atomics", Body((loop(p0, count),), (), tuple(stores)), tensors, expected, tolerance=0.0)


def all_cases() -> list[Case]:
    return [
        *(elementwise(dtype, arity) for dtype in DTYPES for arity in (1, 2)),
        *(with_a_number(dtype) for dtype in DTYPES),
        *(casts(dtype) for dtype in DTYPES),
        where_and_constants(),
        random_numbers(),
        bitcasts(),
        atomics(),
    ]
