"""Index expressions, constants and element-wise operations as Triton text."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache

import sympy
import torch
from torch.utils._sympy import functions as sizes

from overlapc.fx.versions.tensors import float8_saturates
from overlapc.ir.body import Constant, Op
from overlapc.ir.indexing import ModularIndexing, Ranges, at_most, bounds
from overlapc.runtime.triton_kernel import ELEMENT

# dtype -> Triton type in which a kernel computes it, and Triton's type of a pointer to it. A bool is a byte in memory.
COMPUTE = {
    torch.float64: "tl.float64", torch.float32: "tl.float32", torch.int64: "tl.int64", torch.int32: "tl.int32",
    torch.int16: "tl.int16", torch.int8: "tl.int8", torch.uint8: "tl.uint8", torch.bool: "tl.int1",
}  # fmt: skip
POINTER = {dtype: pointer for pointer, dtype in ELEMENT.items()} | {torch.bool: "*u8"}


class IndexPrinter:
    """Prints sympy integers; `names` maps symbols to variables of the kernel.

    Triton's `//` and `%` round toward zero, so operands that may be negative use functions of the prelude.
    """

    def __init__(self, names: Mapping[sympy.Symbol, str], ranges: Ranges) -> None:
        self.names = names
        self.ranges = ranges

    def __call__(self, expr: sympy.Expr) -> str:
        """Return `expr` as text that can be a term of a sum."""
        if isinstance(expr, sympy.Add):
            text = ""
            for term in expr.as_ordered_terms():
                part = self(term)
                text += part if not text else f" - {part[1:]}" if part.startswith("-") else f" + {part}"
            return text
        if isinstance(expr, sympy.Mul):
            number, rest = expr.as_coeff_Mul()
            factors = [str(number)] if number not in (1, -1) else []
            factors += [self.factor(factor) for factor in sympy.Mul.make_args(rest)]
            return ("-" if number == -1 else "") + " * ".join(factors)
        return str(expr) if expr.is_Integer else self.factor(expr)

    def factor(self, expr: sympy.Expr) -> str:
        """Return `expr` as text that can be a factor."""
        if expr.is_Integer:
            return str(expr) if expr >= 0 else f"({expr})"
        if expr.is_Symbol:
            return self.names[expr]
        if isinstance(expr, (sympy.Add, sympy.Mul)):
            return f"({self(expr)})"
        if isinstance(expr, sympy.Pow) and expr.exp.is_Integer and expr.exp > 0:
            return "(" + " * ".join([self.factor(expr.base)] * int(expr.exp)) + ")"
        if isinstance(expr, sizes.FloorDiv):
            return self._floor_div(*expr.args)
        if isinstance(expr, sizes.CeilDiv):
            base, divisor = expr.args
            return f"(({self(base)} + {self(divisor)} - 1) // {self.factor(divisor)})"
        if isinstance(expr, ModularIndexing):
            base, divisor, modulus = expr.args
            if divisor != 1:
                base = sizes.FloorDiv(base, divisor)
            return self._modulo(base, modulus)
        if isinstance(expr, (sizes.Mod, sizes.PythonMod)):
            return self._modulo(*expr.args)
        if isinstance(expr, (sympy.Max, sympy.Min, sizes.Max, sizes.Min)):
            name = "tl.maximum" if isinstance(expr, (sympy.Max, sizes.Max)) else "tl.minimum"
            text = self(expr.args[0])
            for arg in expr.args[1:]:
                text = f"{name}({text}, {self(arg)})"
            return text
        raise NotImplementedError(f"index expression {expr} ({type(expr).__name__}) has no Triton form")

    def _floor_div(self, base: sympy.Expr, divisor: sympy.Expr) -> str:
        if self._nonnegative(base):
            return f"({self.factor(base)} // {self.factor(divisor)})"
        return f"ops.floor_div({self._tensor(base)}, {self(divisor)})"

    def _modulo(self, base: sympy.Expr, modulus: sympy.Expr) -> str:
        if self._nonnegative(base):
            return f"({self.factor(base)} % {self.factor(modulus)})"
        return f"ops.remainder({self._tensor(base)}, {self(modulus)})"

    def _tensor(self, expr: sympy.Expr) -> str:
        """Return `expr` as a typed value: a plain number has no dtype."""
        return f"tl.full([], {expr}, tl.int32)" if expr.is_Integer else self(expr)

    def _nonnegative(self, expr: sympy.Expr) -> bool:
        found = bounds(expr, self.ranges)
        return found is not None and at_most(sympy.S.Zero, found[0])


@lru_cache(50_000)
def unprintable(expr: sympy.Expr) -> str | None:
    """Return the part of an index expression that IndexPrinter cannot print, or None."""
    known = (
        sympy.Add, sympy.Mul, sympy.Symbol, sympy.Integer, sizes.FloorDiv, sizes.CeilDiv, ModularIndexing,
        sizes.Mod, sizes.PythonMod, sympy.Max, sympy.Min, sizes.Max, sizes.Min,
    )  # fmt: skip
    for part in sympy.preorder_traversal(expr):
        power = isinstance(part, sympy.Pow) and part.exp.is_Integer and part.exp > 0
        if not isinstance(part, known) and not power:
            return str(part)
    return None


def number_text(number: float | int | bool) -> str:
    """Return a Python literal that Triton parses to exactly this number."""
    if isinstance(number, float) and not math.isfinite(number):
        return f'float("{number}")'
    return repr(number)


def constant_text(value: Constant) -> str:
    """Return a typed scalar, converted as in torch (a float constant of an integer dtype is truncated)."""
    number = value.number
    if value.dtype is torch.bool:
        number = bool(number)
    elif value.dtype.is_floating_point:
        number = float(number)
    else:
        number = int(number)
    return f"tl.full([], {number_text(number)}, {COMPUTE[value.dtype]})"


# Operations in which a Python literal takes the other operand's dtype; comparisons convert any float to float32.
_COMPARISONS = frozenset("eq ne lt le gt ge".split())
_LITERAL_OPS = _COMPARISONS | {"add", "sub", "mul"}
_LITERAL_DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64)
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
    "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^", "logical_and": "&", "logical_or": "|",
    "logical_xor": "^",
}  # fmt: skip
_BOOL_INFIX = {**_INFIX, "add": "|", "mul": "&", "maximum": "|", "minimum": "&", "ne": "^"}
_LIBDEVICE = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erf erfc lgamma "
    "trunc pow atan2 hypot copysign nextafter fmod".split()
)
_PRELUDE = {
    "sign": "sign", "signbit": "signbit", "sqrt": "sqrt", "sigmoid": "sigmoid", "div": "divide",
    "fma": "fma", "maximum": "maximum", "minimum": "minimum", "remainder": "remainder", "floor_div": "floor_div",
}  # fmt: skip
_FLOAT_ONLY = _LIBDEVICE - {"pow", "fmod", "trunc"} | {"sqrt", "rsqrt", "reciprocal", "sigmoid", "div", "fma"}


def unsupported(op: Op) -> str | None:
    """Return why `op` cannot be written in Triton, or None."""
    dtype = op.args[-1].dtype
    if op.name in _FLOAT_ONLY and not dtype.is_floating_point:
        return f"{op.name} of {dtype}"
    if dtype is torch.bool and op.name in ("sub", "neg", "pow", "remainder", "floor_div", "trunc_div", "fmod"):
        return f"{op.name} of {dtype}"
    return None


def as_literal(op: Op, position: int) -> str | None:
    """Return a literal that can replace argument `position` of `op` exactly, or None."""
    arg, other = op.args[position], op.args[1 - position] if len(op.args) == 2 else None
    if op.name not in _LITERAL_OPS or other is None or isinstance(other, Constant):
        return None
    if not isinstance(arg, Constant) or arg.dtype not in _LITERAL_DTYPES or arg.dtype != other.dtype:
        return None
    if op.name in _COMPARISONS and arg.dtype == torch.float64:
        return None
    number = float(arg.number) if arg.dtype.is_floating_point else int(arg.number)
    text = number_text(number)
    return f"({text})" if text.startswith("-") else text


def operation(op: Op, args: Sequence[str]) -> str:
    """Return the text of `op`, given the texts of its arguments (names or literals)."""
    dtype = op.args[-1].dtype
    if op.coarse:
        return f"ops.coarse_{op.name}({', '.join(args)})"
    name, first = op.name, args[0]
    if name == "where":
        return f"tl.where({', '.join(args)})"
    if name in ("random", "random_word"):
        return f"ops.{name}({', '.join(args)})"
    if name == "bitcast":
        return f"{first}.to({COMPUTE[op.dtype]}, bitcast=True)"
    if dtype is torch.bool:
        return _on_bools(name, args)
    if name in ("logical_and", "logical_or", "logical_xor"):
        return f"({args[0]} != 0) {_INFIX[name]} ({args[1]} != 0)"
    if name in _INFIX:
        return f"{args[0]} {_INFIX[name]} {args[1]}"
    if dtype.is_floating_point:
        return _on_floats(name, args, dtype)
    if name in _PRELUDE:
        return f"ops.{_PRELUDE[name]}({', '.join(args)})"
    return _on_integers(name, first, args, dtype)


def _on_bools(name: str, args: Sequence[str]) -> str:
    if name in ("logical_not", "bitwise_not"):
        return f"{args[0]} == 0"
    if name in ("abs", "relu", "sign", "floor", "ceil", "trunc", "round"):
        return args[0]
    if name in ("isnan", "isinf", "signbit"):
        return f"{args[0]} != {args[0]}"
    if name in ("lt", "le", "gt", "ge"):  # int1 is signed: True would be -1
        return f"{args[0]}.to(tl.int32) {_INFIX[name]} {args[1]}.to(tl.int32)"
    if name == "eq":
        return f"({args[0]} ^ {args[1]}) == 0"
    return f"{args[0]} {_BOOL_INFIX[name]} {args[1]}"


def _on_floats(name: str, args: Sequence[str], dtype: torch.dtype) -> str:
    first = args[0]
    simple = {
        "neg": f"{first} * -1.0",  # Triton's own minus subtracts from 0, which makes 0 of 0 instead of -0
        "abs": f"tl.abs({first})",
        "reciprocal": f"ops.divide(tl.full([], 1.0, {COMPUTE[dtype]}), {first})",
        "rsqrt": f"tl.rsqrt({first})",
        "relu": f"ops.maximum({first}, tl.full([], 0.0, {COMPUTE[dtype]}))",
        "floor": f"tl.floor({first})",
        "ceil": f"tl.ceil({first})",
        "round": f"ops.libdevice.rint({first})",
        "isnan": f"{first} != {first}",
        "isinf": f'tl.abs({first}) == float("inf")',
        "logical_not": f"{first} == 0",
    }
    if name in simple:
        return simple[name]
    if name == "trunc_div":
        return f"ops.libdevice.trunc(ops.divide({', '.join(args)}))"
    if name in _LIBDEVICE:
        return f"ops.libdevice.{name}({', '.join(args)})"
    return f"ops.{_PRELUDE[name]}({', '.join(args)})"


def _on_integers(name: str, first: str, args: Sequence[str], dtype: torch.dtype) -> str:
    bits = torch.iinfo(dtype).bits
    if name in ("floor", "ceil", "trunc", "round") or (name == "abs" and dtype is torch.uint8):
        return first
    if name == "pow":
        return f"ops.integer_power({', '.join(args)})"
    if name == "shift_left":
        return f"ops.shift_left({', '.join(args)}, {bits})"
    if name == "shift_right":
        return f"ops.shift_right({', '.join(args)}, {bits - int(dtype.is_signed)})"
    zero = f"tl.full([], 0, {COMPUTE[dtype]})"
    return {
        "neg": f"{zero} - {first}",
        "abs": f"tl.abs({first})",
        "relu": f"tl.maximum({first}, {zero})",
        "isnan": f"{first} != {first}",
        "isinf": f"{first} != {first}",
        "logical_not": f"{first} == 0",
        "bitwise_not": f"~{first}" if dtype.is_signed else f"{first} ^ tl.full([], 255, tl.uint8)",
        "trunc_div": f"{first} // {args[-1]}",
        "fmod": f"{first} % {args[-1]}",
    }[name]


def converted(text: str, source: torch.dtype, to: torch.dtype) -> str:
    """Convert `text` of compute dtype `source` to the memory dtype `to`, with the semantics of `tensor.to`."""
    if to is source:
        return text
    if to is torch.bool:
        return f"{text} != 0"
    if to is torch.bfloat16:
        return f"ops.to_bf16({converted_name(text, source, torch.float32)})"
    if to is torch.float8_e4m3fn:
        suffix = "_saturated" if float8_saturates() else ""
        return f"ops.to_fp8e4nv{suffix}({converted_name(text, source, torch.float32)})"
    if to is torch.float8_e5m2:
        return f"ops.to_fp8e5({converted_name(text, source, torch.float32)})"
    if to is torch.float16:
        return f"ops.to_fp16({converted_name(text, source, torch.float32)})"
    if source.is_floating_point and to in (torch.uint8, torch.int8, torch.int16):
        return f"{text}.to(tl.int64).to({COMPUTE[to]})"  # wraps, as eager does
    return f"{text}.to({COMPUTE[to]})"


def converted_name(text: str, source: torch.dtype, to: torch.dtype) -> str:
    return text if source is to else f"{text}.to({COMPUTE[to]})"


def neutral(kind: str, dtype: torch.dtype) -> str:
    """Return the neutral element of a reduction of `kind` over `dtype`."""
    if kind in ("sum", "dot", "prod"):
        one = kind == "prod"
        return number_text(float(one) if dtype.is_floating_point else int(one))
    if kind in ("any", "all"):
        return "0" if kind == "any" else "1"
    lowest = kind in ("max", "argmax")
    if dtype.is_floating_point:
        return number_text(-math.inf if lowest else math.inf)
    limits = torch.iinfo(dtype)
    return str(limits.min if lowest else limits.max)
