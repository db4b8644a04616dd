"""Lowers element-wise ops: arithmetic, comparisons, casts, and the building blocks of activations."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import sympy
import torch
from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as PROMOTION

from overlapc.fx.written_numbers import written_number
from overlapc.ir.body import LOW_PRECISION, Body, Cast, Checked, Constant, Index, Value, as_number, op, ranges_of
from overlapc.ir.conversions import cast, compute_dtype, constant
from overlapc.ir.indexing import bounds
from overlapc.ir.ops import View
from overlapc.lowering.context import Lowering
from overlapc.lowering.table import Impossible, lowers, lowers_by_name

aten = torch.ops.aten
prims = torch.ops.prims

DEFAULT = PROMOTION.DEFAULT
TO_FLOAT = PROMOTION.INT_TO_FLOAT
TO_BOOL = PROMOTION.ALWAYS_BOOL

# aten name -> type promotion; the operation has the same name. Every overload that exists is registered.
UNARY = {
    **dict.fromkeys("neg abs sign floor ceil trunc".split(), DEFAULT),
    **dict.fromkeys(
        "reciprocal sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh "
        "asinh acosh atanh erf erfc lgamma sigmoid".split(),
        TO_FLOAT,
    ),
    **dict.fromkeys("isnan isinf signbit logical_not".split(), TO_BOOL),
}
BINARY = {
    **dict.fromkeys("mul maximum minimum remainder fmod bitwise_and bitwise_or bitwise_xor hypot".split(), DEFAULT),
    **dict.fromkeys("atan2 copysign".split(), TO_FLOAT),
    **dict.fromkeys("eq ne lt le gt ge logical_and logical_or logical_xor".split(), TO_BOOL),
}
# Operation -> the operation that it is on bools in torch.
ON_BOOL = {
    "add": "logical_or",
    "mul": "logical_and",
    "maximum": "logical_or",
    "minimum": "logical_and",
    "bitwise_and": "logical_and",
    "bitwise_or": "logical_or",
    "bitwise_xor": "logical_xor",
    "bitwise_not": "logical_not",
}
# Operations whose result jumps with their argument: eager rounds a number to the tensor's low precision first.
SHARP = frozenset("eq ne lt le gt ge remainder fmod".split())
STEPS = frozenset("sign floor ceil trunc round signbit".split())  # likewise, for arguments not rounded to memory yet
# Operations for which eager's CPU kernels read a second 0-dim tensor as a number, without rounding it.
SCALED_BY_NUMBER = frozenset("mul div floor_div trunc_div".split())
DIVISIONS = frozenset("floor_div trunc_div remainder fmod".split())
ROUND_ON_FLOAT_ONLY = frozenset(("floor", "ceil", "trunc", "round"))


def compute(name: str, kind: PROMOTION, context: Lowering, *args: Any) -> View:
    """Add a kernel of one IR operation over `args`, promoted as in torch."""
    dtype = context.promoted(kind, *args)
    if kind is TO_BOOL:  # compared in the arguments' common dtype
        dtype = context.promoted(DEFAULT, *args)
    if dtype.is_complex:
        raise Impossible("complex numbers")
    if name in DIVISIONS and not dtype.is_floating_point and context.value_of().device.type == "cpu":
        return _whole_quotient(name, dtype, context, *args)
    return context.pointwise(lambda *values: apply(name, dtype, *as_read(context, name, args, values)), *args)


def _whole_quotient(name: str, dtype: torch.dtype, context: Lowering, x: Any, y: Any) -> View:
    """Add a kernel that divides integers by a number, and raises if that is 0, as eager does on a CPU.

    Divisions by a tensor are left to eager, because fusion may mask the loads of its elements: where padding needs no
    quotient, a check would see the 0 of a masked load.
    """
    known = context.number_of(y)
    if isinstance(y, View) and known is None:
        raise Impossible("integers divided by a tensor, which may contain 0")
    number = cast(context.scalar(y) if known is None else known, dtype)
    if as_number(number) == 0:
        raise Impossible("integers divided by 0")
    is_size = isinstance(number, Index) and dtype == torch.int64 and number.expr.is_positive  # int8 would wrap it
    if not isinstance(number, Constant) and not is_size:
        number = Checked(number, op("ne", number, constant(0, dtype)), "ZeroDivisionError")
    return context.pointwise(lambda value: apply(name, dtype, value, number), x)


def as_read(context: Lowering, name: str, args: Sequence[Any], values: Sequence[Value]) -> list[Value]:
    """Return the arguments' values as eager's kernel reads them: rounded to their common dtype if of low precision.

    Eager rounds tensors of another dtype (integers, and 0-dim float32 tensors) before it computes.
    """
    common = context.common_dtype(*args)
    if common not in LOW_PRECISION:
        return list(values)

    def is_rounded(at: int, arg: Any) -> bool:
        if name in SHARP and (getattr(arg, "dtype", None) != common or not context.target.rounds):
            return True
        if not context.target.rounds:
            return name in STEPS
        if not isinstance(arg, View) or arg.dtype == common:
            return False
        if context.number_of(arg) is not None and context.value_of().device.type != "cpu":
            return False
        is_number = at == 1 and not arg.size and arg.layout.device.type == "cpu"
        return not (is_number and name in SCALED_BY_NUMBER)

    return [
        convert(value, common) if is_rounded(at, arg) else value
        for at, (arg, value) in enumerate(zip(args, values, strict=True))
    ]


def apply(name: str, dtype: torch.dtype, *values: Value) -> Value:
    """Apply operation `name` to values converted to `dtype`, with torch's semantics for bools and integers."""
    if dtype == torch.bool:
        name = ON_BOOL.get(name, name)
    if not dtype.is_floating_point:
        if name in ROUND_ON_FLOAT_ONLY:
            return cast(values[0], dtype)
        if name in ("isnan", "isinf"):
            return constant(False, torch.bool)
    if name in ("logical_not", "logical_and", "logical_or", "logical_xor"):
        return op(name, *(truth(value) for value in values))
    return op(name, *(cast(value, dtype) for value in values))


def truth(value: Value) -> Value:
    """Return `value != 0` as bool."""
    return value if value.dtype == torch.bool else op("ne", value, constant(0, value.dtype))


def _overloads(name: str) -> list[Any]:
    packet = getattr(aten, name)
    wanted = ("default", "Tensor", "Scalar", "Scalar_Tensor", "Tensor_Scalar", "self")
    return [getattr(packet, overload) for overload in packet.overloads() if overload in wanted]


def _register(name: str, kind: PROMOTION) -> None:
    for overload in _overloads(name):
        lowers(overload)(lambda context, *args, **kwargs: _plain(name, kind, context, args, kwargs))


def _plain(name: str, kind: PROMOTION, context: Lowering, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View:
    if kwargs:
        raise Impossible(f"keyword arguments {', '.join(kwargs)}")
    return compute(name, kind, context, *args)


for _name, _kind in {**UNARY, **BINARY}.items():
    _register(_name, _kind)


@lowers(aten.bitwise_not.default)
def bitwise_not(context: Lowering, x: View) -> View:
    return compute("bitwise_not", DEFAULT, context, x)


@lowers(aten.round.default)
def round_(context: Lowering, x: View) -> View:
    return compute("round", DEFAULT, context, x)


@lowers(aten.bitwise_left_shift.Tensor, aten.bitwise_left_shift.Tensor_Scalar)
def shift_left(context: Lowering, x: Any, by: Any) -> View:
    return compute("shift_left", DEFAULT, context, x, by)


@lowers(aten.bitwise_right_shift.Tensor, aten.bitwise_right_shift.Tensor_Scalar)
def shift_right(context: Lowering, x: Any, by: Any) -> View:
    return compute("shift_right", DEFAULT, context, x, by)


@lowers(aten.nextafter.default)
def nextafter(context: Lowering, x: View, y: View) -> View:
    if x.dtype in (torch.float16, torch.bfloat16):
        raise Impossible("the next number in a low precision: kernels compute in float32")
    return compute("nextafter", DEFAULT, context, x, y)


@lowers(aten.relu.default)
def relu(context: Lowering, x: View) -> View:
    # maximum(x, 0) propagates NaN, as relu does.
    return context.pointwise(lambda value: apply("maximum", x.dtype, value, constant(0, value.dtype)), x)


@lowers(aten.add.Tensor, aten.add.Scalar)
def add(context: Lowering, x: Any, y: Any, alpha: Any = 1) -> View:
    return _scaled_sum(context, "add", x, y, alpha)


@lowers(aten.sub.Tensor, aten.sub.Scalar)
def sub(context: Lowering, x: Any, y: Any, alpha: Any = 1) -> View:
    return _scaled_sum(context, "sub", x, y, alpha)


@lowers(aten.rsub.Tensor, aten.rsub.Scalar)
def rsub(context: Lowering, x: Any, y: Any, alpha: Any = 1) -> View:
    return _scaled_sum(context, "sub", y, x, alpha)


def _scaled_sum(context: Lowering, name: str, x: Any, y: Any, alpha: Any) -> View:
    dtype = context.promoted(DEFAULT, x, y)
    if dtype.is_complex:
        raise Impossible("complex numbers")

    def value(*values: Value) -> Value:
        a, b = as_read(context, name, (x, y), values)
        if alpha == 1:
            return apply(name, dtype, a, b)
        b, factor = cast(b, dtype), context.scalar(alpha)
        if not dtype.is_floating_point:
            return apply(name, dtype, a, apply("mul", dtype, b, factor))
        return apply("fma", dtype, b if name == "add" else op("neg", b), factor, a)  # rounded once, as in eager

    return context.pointwise(value, x, y)


@lowers(aten.div.Tensor, aten.div.Scalar)
def div(context: Lowering, x: Any, y: Any) -> View:
    known = context.number_of(y)
    number = y if known is None else known.number
    dtype = context.promoted(TO_FLOAT, x, y)
    if (
        isinstance(x, View)
        and x.layout.device.type == "cuda"
        and isinstance(number, int | float)
        and not dtype.is_complex
    ):
        # On GPUs eager multiplies by the inverse of a number; this gives the same bits.
        inverse = constant(_inverse(number, dtype), dtype)
        return context.pointwise(
            lambda value: apply("mul", dtype, *as_read(context, "mul", (x, y), (value, inverse))), x
        )
    return compute("div", TO_FLOAT, context, x, y)


def _inverse(number: float, dtype: torch.dtype) -> float:
    """Return 1 / number, computed in `dtype`."""
    rounded = ctypes.c_double if dtype is torch.float64 else ctypes.c_float
    divisor = rounded(number).value
    return rounded(1.0 / divisor).value if divisor else math.copysign(math.inf, divisor)


@lowers(aten.div.Tensor_mode, aten.div.Scalar_mode)
def div_mode(context: Lowering, x: Any, y: Any, rounding_mode: str | None = None) -> View:
    if rounding_mode is None:
        return div(context, x, y)
    return compute("floor_div" if rounding_mode == "floor" else "trunc_div", DEFAULT, context, x, y)


@lowers(aten.floor_divide.default, aten.floor_divide.Scalar)
def floor_divide(context: Lowering, x: Any, y: Any) -> View:
    return compute("floor_div", DEFAULT, context, x, y)


@lowers(aten.pow.Tensor_Scalar, aten.pow.Tensor_Tensor, aten.pow.Scalar)
def power(context: Lowering, base: Any, exponent: Any) -> View:
    dtype = context.promoted(DEFAULT, base, exponent)
    # For two tensors, eager calls pow on a CPU; on a GPU it reads an exponent that is a 0-dim CPU tensor as a number.
    is_number = not isinstance(exponent, View) or context.value_of().device.type != "cpu"

    def value(*values: Value) -> Value:
        x, y = (cast(read, dtype) for read in as_read(context, "pow", (base, exponent), values))
        number = y.number if is_number and isinstance(y, Constant) else None
        if number in (2, 3):  # eager's implementation for these exponents; the bits are equal
            square = op("mul", x, x)
            return square if number == 2 else op("mul", square, x)
        if number == -2 and dtype.is_floating_point:
            return op("reciprocal", op("mul", x, x))
        if number == 1:
            return x
        if number == 0.5:
            return op("sqrt", x)
        if number == -0.5:
            return op("rsqrt", x)
        if number == -1 and dtype.is_floating_point:
            return op("reciprocal", x)
        return op("pow", x, y)

    return context.pointwise(value, base, exponent)


@lowers(aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf, aten.where.Scalar)
def where(context: Lowering, condition: View, x: Any, y: Any) -> View:
    dtype = context.promoted(PROMOTION.NO_OPMATH, x, y)
    return context.pointwise(lambda c, a, b: op("where", truth(c), cast(a, dtype), cast(b, dtype)), condition, x, y)


@lowers(aten.masked_fill.Scalar, aten.masked_fill.Tensor)
def masked_fill(context: Lowering, x: View, mask: View, value: Any) -> View:
    context.check_held(x.dtype, value)
    return context.pointwise(lambda a, m, v: op("where", truth(m), cast(v, x.dtype), cast(a, x.dtype)), x, mask, value)


@lowers(aten.clamp.default, aten.clamp.Tensor)
def clamp(context: Lowering, x: View, minimum: Any = None, maximum: Any = None) -> View:
    limits = [limit for limit in (minimum, maximum) if limit is not None]
    dtype = context.promoted(DEFAULT, x, *limits)
    context.check_held(dtype, *limits)

    def value(a: Value, *bounds: Value) -> Value:
        given = iter(bounds)
        a = cast(a, dtype)
        if minimum is not None:
            a = apply("maximum", dtype, a, next(given))
        if maximum is not None:
            a = apply("minimum", dtype, a, next(given))
        return a

    return context.pointwise(value, x, *limits)


@lowers(aten.clamp_min.default, aten.clamp_min.Tensor)
def clamp_min(context: Lowering, x: View, minimum: Any) -> View:
    return clamp(context, x, minimum)


@lowers(aten.clamp_max.default, aten.clamp_max.Tensor)
def clamp_max(context: Lowering, x: View, maximum: Any) -> View:
    return clamp(context, x, None, maximum)


@lowers(aten.addcmul.default)
def addcmul(context: Lowering, x: View, a: View, b: View, value: Any = 1) -> View:
    return _addc(context, "mul", x, a, b, value)


@lowers(aten.addcdiv.default)
def addcdiv(context: Lowering, x: View, a: View, b: View, value: Any = 1) -> View:
    return _addc(context, "div", x, a, b, value)


def _addc(context: Lowering, name: str, x: View, a: View, b: View, value: Any) -> View:
    dtype = context.promoted(DEFAULT, x, a, b)
    if name == "div" and not dtype.is_floating_point:
        raise Impossible("integer division")

    def compute_(base: Value, first: Value, second: Value) -> Value:
        # Eager scales the first factor, then combines; a product and its sum are rounded once.
        first = cast(first, dtype)
        if value != 1:
            first = apply("mul", dtype, first, context.scalar(value))
        if name == "mul" and dtype.is_floating_point:
            return apply("fma", dtype, first, second, base)
        return apply("add", dtype, base, apply(name, dtype, first, second))

    return context.pointwise(compute_, x, a, b)


@lowers_by_name("prims.fma.default")  # used by optimizers that Dynamo of torch 2.13 traces
def fma(context: Lowering, x: Any, y: Any, z: Any) -> View:
    dtype = context.promoted(DEFAULT, x, y, z)
    if not dtype.is_floating_point:
        raise Impossible("a fused product of integers")
    return context.pointwise(lambda a, b, c: apply("fma", dtype, a, b, c), x, y, z)


@lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(context: Lowering, start: View, end: View, weight: Any) -> View:
    dtype = context.promoted(DEFAULT, start, end)

    def value(a: Value, b: Value, w: Value) -> Value:
        a, b, w = cast(a, dtype), cast(b, dtype), cast(w, dtype)
        gap = op("sub", b, a)
        near = op("fma", w, gap, a)  # rounded once, as in eager
        far = op("fma", op("neg", gap), op("sub", constant(1, w.dtype), w), b)
        return op("where", op("lt", op("abs", w), constant(0.5, w.dtype)), near, far)

    return context.pointwise(value, start, end, weight)


@lowers(aten.silu.default)
def silu(context: Lowering, x: View) -> View:
    dtype = context.promoted(TO_FLOAT, x)
    return context.pointwise(lambda a: op("mul", cast(a, dtype), op("sigmoid", cast(a, dtype))), x)


@lowers(aten.gelu.default)
def gelu(context: Lowering, x: View, approximate: str = "none") -> View:
    dtype = context.promoted(DEFAULT, x)

    def value(a: Value) -> Value:
        a = cast(a, dtype)

        def number(x: float) -> Value:
            return constant(x, a.dtype)

        half = op("mul", a, number(0.5))
        if approximate == "none":
            return op("mul", half, op("add", number(1), op("erf", op("mul", a, number(math.sqrt(0.5))))))
        cube = op("mul", op("mul", a, a), a)
        inner = op("mul", number(math.sqrt(2 / math.pi)), op("add", a, op("mul", number(0.044715), cube)))
        return op("mul", half, op("add", number(1), op("tanh", inner)))

    return context.pointwise(value, x)


@lowers(aten._to_copy.default)
def to_copy(
    context: Lowering,
    x: View,
    dtype: torch.dtype | None = None,
    device: Any = None,
    layout: Any = None,
    pin_memory: Any = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> View:
    if layout not in (None, torch.strided) or pin_memory:
        raise Impossible("another tensor layout or pinned memory")
    return convert_element_type(context, x, dtype or x.dtype)


@lowers(prims.convert_element_type.default)
def convert_element_type(context: Lowering, x: View, dtype: torch.dtype) -> View:
    if dtype.is_floating_point:
        return context.pointwise(lambda value: convert(value, dtype), x)
    return context.pointwise(lambda value: convert(settled(context, value, x), dtype), x)


def settled(context: Lowering, value: Value, x: View) -> Value:
    """Return an element of `x` rounded to its own dtype, as step functions, searches and integer casts need it."""
    return value if context.target.rounds or x.dtype not in LOW_PRECISION else Cast(value, x.dtype)


def convert(value: Value, dtype: torch.dtype) -> Value:
    """Return a cast that is part of the program: unlike for intermediate results, it rounds to low precision."""
    if dtype in LOW_PRECISION or value.dtype != dtype:
        return truth(value) if dtype == torch.bool else Cast(value, dtype)
    return value


@lowers(aten.clone.default, aten.alias_copy.default)
def clone(context: Lowering, x: View, memory_format: Any = None) -> View:
    return context.pointwise(lambda value: value, x)


@lowers(aten.lift_fresh_copy.default)
def lift_fresh_copy(context: Lowering, x: View) -> View:
    """Copy a tensor that is written in the program, such as `torch.tensor(0.5)`, and note its number."""
    copied = clone(context, x)
    number = written_number(context.graph.constants.get(x.buffer))
    if number is not None and not isinstance(number, complex):
        context.numbers[copied.buffer] = constant(number, x.dtype)
    return copied


@lowers(aten.copy.default)
def copy(context: Lowering, destination: View, source: View, non_blocking: bool = False) -> View:
    return context.pointwise(lambda value: convert(value, destination.dtype), source)


@lowers(aten.copy_.default)
def copy_(context: Lowering, destination: View, source: View, non_blocking: bool = False) -> View:
    """Copy directly into the destination, so that the kernel that computes the source may store there itself."""
    if source == destination:
        return destination
    if destination.buffer in {view.buffer for view in context.original_inputs.values()}:
        raise Impossible("memory that holds the negatives or conjugates of its numbers")
    if not destination.layout.is_dense():
        raise Impossible("a destination with holes or overlaps")
    if context.graph.root(source.buffer) == context.graph.root(destination.buffer):
        raise Impossible("other elements of the same memory")

    def body(out: View) -> Body:
        loops, position = context.loops_over(out.layout)
        value = convert(context.element(source, position), out.dtype)
        return Body(loops, (), (context.store(out, position, value),))

    return context.update(destination, body)


@lowers(aten.full.default, aten.full_like.default, aten.scalar_tensor.default, aten.new_full.default)
def full(context: Lowering, *args: Any, **kwargs: Any) -> View:
    number = kwargs["fill_value"] if "fill_value" in kwargs else args[-1]
    return fill(context, number)


@lowers(aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten._efficientzerotensor.default)
def zeros(context: Lowering, *args: Any, **kwargs: Any) -> View:
    return fill(context, 0)


@lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(context: Lowering, *args: Any, **kwargs: Any) -> View:
    return fill(context, 1)


def fill(context: Lowering, number: Any) -> View:
    dtype = context.value_of().dtype
    context.check_held(dtype, number)
    if isinstance(number, sympy.Expr | int | float | bool):
        return context.pointwise(lambda: cast(context.scalar(number), dtype))
    raise Impossible(f"a {type(number).__name__} fill value")


@lowers(aten.fill.Scalar)
def fill_scalar(context: Lowering, x: View, number: Any) -> View:
    return fill(context, number)


@lowers(aten.arange.start_step)
def arange(context: Lowering, start: Any, end: Any, step: Any = 1, **kwargs: Any) -> View:
    dtype = context.value_of().dtype
    if dtype.is_floating_point or not all(isinstance(x, int | sympy.Expr) for x in (start, step)):
        raise Impossible("a floating-point range")  # left to eager, which computes it in double
    return _iota(context, start, step, dtype)


@lowers(prims.iota.default)
def iota(context: Lowering, length: Any, start: Any, step: Any, dtype: torch.dtype, **kwargs: Any) -> View:
    return _iota(context, start, step, dtype)


def _iota(context: Lowering, start: Any, step: Any, dtype: torch.dtype) -> View:
    def body(out: View) -> Body:
        loops, position = context.loops_over(out.layout)
        number, info = start + step * position[0], torch.iinfo(dtype)
        limits = bounds(number, ranges_of(loops))
        fits = limits is not None and all(limit.is_Integer and info.min <= limit <= info.max for limit in limits)
        value = Index(number, compute_dtype(dtype) if fits else torch.int64)
        return Body(loops, (), (context.store(out, position, value),))

    return context.loops(body)
