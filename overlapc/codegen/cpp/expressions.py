"""Values and index expressions of a loop body as C++ expressions."""

from __future__ import annotations

import ctypes
import math
import re
from collections.abc import Mapping
from functools import lru_cache

import sympy
import torch
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, PythonMod

from overlapc.ir.body import Op, Scan, Value, as_number
from overlapc.ir.indexing import ModularIndexing

# dtype of a value -> C++ type in which it is computed.
C_TYPE: Mapping[torch.dtype, str] = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int64: "int64_t",
    torch.int32: "int32_t",
    torch.int16: "int16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
    torch.bool: "bool",
}
# dtype -> C++ type of an element in memory. A bool is a byte there: reading 2 from a `bool` would be undefined.
MEMORY_TYPE: Mapping[torch.dtype, str] = {
    **C_TYPE,
    torch.bool: "uint8_t",
    torch.bfloat16: "uint16_t",
    torch.float16: "uint16_t",
    torch.float8_e4m3fn: "uint8_t",
    torch.float8_e5m2: "uint8_t",
}
# Formats without arithmetic, which are only loaded and stored -> suffix of their functions in prelude.h.
FORMAT = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float8_e4m3fn: "e4m3",
    torch.float8_e5m2: "e5m2",
}


@lru_cache(50_000)
def index_text(expr: sympy.Expr) -> str:
    """Return C++ for an index expression, in which every symbol is an int64_t.

    Raise NotImplementedError with the name of a function for which there is no C++.
    """
    if expr.is_Integer:
        return str(expr) if abs(int(expr)) < 2**31 else f"INT64_C({expr})"
    if expr.is_Symbol:
        return str(expr)
    if isinstance(expr, sympy.Add):
        text = ""
        for term in expr.as_ordered_terms():
            negative = term.as_coeff_Mul()[0].is_negative
            part = index_text(-term if negative else term)
            text += (" - " if negative else " + ") + part if text else ("-" if negative else "") + part
        return text
    if isinstance(expr, sympy.Mul):
        return " * ".join(_factor(factor) for factor in expr.args)
    if isinstance(expr, sympy.Pow) and expr.args[1].is_Integer and expr.args[1] > 0:
        return " * ".join([_factor(expr.args[0])] * int(expr.args[1]))
    if isinstance(expr, FloorDiv):
        return _divide(expr.args[0], expr.args[1])
    if isinstance(expr, ModularIndexing):
        base, divisor, modulus = expr.args
        quotient = index_text(base) if divisor == 1 else _divide(base, divisor)
        if base.is_nonnegative and modulus.is_nonnegative:
            return f"({quotient}) % {_divisor(modulus)}"
        return f"remainder_<int64_t>({quotient}, {index_text(modulus)})"
    if isinstance(expr, (Mod, PythonMod)):
        return f"remainder_<int64_t>({index_text(expr.args[0])}, {index_text(expr.args[1])})"
    if isinstance(expr, (Max, Min, sympy.Max, sympy.Min)):
        name = "at_least" if isinstance(expr, (Max, sympy.Max)) else "at_most"
        text = index_text(expr.args[0])
        for arg in expr.args[1:]:
            text = f"{name}({text}, {index_text(arg)})"
        return text
    raise NotImplementedError(f"{type(expr).__name__} in the index {expr}")


def _factor(expr: sympy.Expr) -> str:
    text = index_text(expr)
    return text if expr.is_Symbol or (expr.is_Integer and not expr.is_negative) else f"({text})"


def _divide(base: sympy.Expr, divisor: sympy.Expr) -> str:
    if base.is_nonnegative and divisor.is_nonnegative:
        return f"({index_text(base)}) / {_divisor(divisor)}"
    return f"floor_div<int64_t>({index_text(base)}, {index_text(divisor)})"


def _divisor(expr: sympy.Expr) -> str:
    """Return a nonnegative divisor. A size may be 0: loops over it are empty then, but the compiler may hoist divisions
    out of them, and a division by 0 would trap."""
    return _factor(expr) if expr.is_positive else f"at_least({index_text(expr)}, 1)"


def constant_text(number: float | int | bool, dtype: torch.dtype) -> str:
    """Return a literal whose C++ type is exactly the one that computes `dtype`."""
    if dtype == torch.bool:
        return "true" if number else "false"
    if dtype.is_floating_point:
        value = float(number)
        if dtype == torch.float32:
            value = ctypes.c_float(value).value  # its decimal, unlike the double's, is rounded once
        if math.isnan(value):
            return "NAN" if dtype == torch.float32 else "(double)NAN"
        if math.isinf(value):
            text = "INFINITY" if dtype == torch.float32 else "(double)INFINITY"
            return text if value > 0 else f"-{text}"
        return repr(value) + ("f" if dtype == torch.float32 else "")
    value = int(number)
    if dtype == torch.int32 and value > -(2**31):
        return str(value)
    if value == -(2**63):
        return "INT64_MIN"
    return f"{C_TYPE[dtype]}({f'INT64_C({value})' if abs(value) >= 2**31 else value})"


def load_text(place: str, memory_dtype: torch.dtype) -> str:
    """Return the expression that loads the value stored at `place`, such as `in0[i]`."""
    if memory_dtype in FORMAT:
        return f"load_{FORMAT[memory_dtype]}({place})"
    return f"{place} != 0" if memory_dtype == torch.bool else place


def cast_text(value: str, source: torch.dtype, to: torch.dtype) -> str:
    """Convert `value` of dtype `source` to the C++ type that computes `to`, rounded to the precision of `to`."""
    if to in FORMAT:
        number = _convert(value, source, torch.float32)
        return number if source == torch.bool else f"round_{FORMAT[to]}({number})"
    return _convert(value, source, to)


def store_text(value: str, source: torch.dtype, memory_dtype: torch.dtype) -> str:
    """Convert `value` of dtype `source` to an element in memory."""
    if memory_dtype in FORMAT:
        return f"store_{FORMAT[memory_dtype]}({_convert(value, source, torch.float32)})"
    if memory_dtype == torch.bool:
        return f"uint8_t({_convert(value, source, torch.bool)})"
    return _convert(value, source, memory_dtype)


def _convert(value: str, source: torch.dtype, to: torch.dtype) -> str:
    if source == to:
        return value
    if to == torch.bool:
        return f"({value} != 0)"
    if source == torch.bool and to.is_floating_point:
        return f"({value} ? {constant_text(1, to)} : {constant_text(0, to)})"  # a select, which vectorizes
    if source.is_floating_point and to in (torch.int32, torch.int64):
        return f"truncated<{C_TYPE[to]}>({value})"
    if source.is_floating_point and not to.is_floating_point:  # out of range: the low bits, as eager does
        wide = "int64_t" if to == torch.uint8 and source == torch.float64 else "int32_t"
        return f"{C_TYPE[to]}(truncated<{wide}>({value}))"
    return f"{C_TYPE[to]}({value})"


_INFIX = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "add": "+",
    "sub": "-",
    "mul": "*",
}
_BITWISE = {"bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
_LOGICAL = {"logical_and": "&", "logical_or": "|", "logical_xor": "^"}  # not && and ||, which branch
_PRELUDE = {
    "abs": "absolute", "sign": "sign", "signbit": "sign_bit", "relu": "relu", "sigmoid": "sigmoid",
    "floor_div": "floor_div", "trunc_div": "trunc_div", "remainder": "remainder_", "fmod": "fmod_",
    "exp": "exponential", "erf": "error_function",
    "pow": "power", "maximum": "maximum", "minimum": "minimum",
    "shift_left": "shift_left", "shift_right": "shift_right",
}  # fmt: skip
# Functions named as in C's math.h, with an f for float.
_MATH = frozenset(
    "sqrt exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh asinh acosh atanh erfc "
    "lgamma floor ceil trunc atan2 hypot copysign nextafter".split()
)
_ROUNDING = frozenset({"floor", "ceil", "trunc", "round"})
# The functions of `_MATH` that prelude.h implements alike for vectors and single numbers, as `same_sinf`.
_SAME = _MATH - set("sqrt lgamma floor ceil trunc copysign nextafter".split())
# Functions that are calls of the vector library; those below are inline in float32.
_CALLS = _SAME | {"pow"}
_INLINE_IN_FLOAT32 = frozenset({"exp", "erf", "sigmoid"})
# Cost of an operation in additions; used to decide whether there is enough work to start threads.
HEAVY = dict.fromkeys(_MATH | {"exp", "erf", "sigmoid", "pow"}, 10) | dict.fromkeys(
    ("floor", "ceil", "trunc", "sqrt", "copysign"), 1
)
HEAVY |= dict.fromkeys(("random", "random_word"), 40)  # ten rounds of two products
EXPENSIVE = 10  # cost from which a value is stored rather than recomputed: exp and similar functions
_SCAN_WEIGHT = 10  # each step depends on the previous one
# Functions without a vector version: the loop around them runs one element at a time.
SCALAR_ONLY = frozenset({"lgamma", "nextafter"})


def operation_text(op: Op, args: list[str]) -> str:
    """Return C++ for an element-wise operation on `args`, which are names or literals."""
    if op.name == "bitcast":
        return f"bits<{C_TYPE[op.dtype]}>({args[0]})"
    if op.name in _RANDOM:
        return f"{op.name}({', '.join(args)})"
    dtype = op.args[-1].dtype
    kind = C_TYPE[dtype]
    text = _operation(op, args, dtype, kind)
    computed = torch.bool if op.name in _YIELDS_BOOL else dtype
    return text if computed == op.dtype else _convert(f"({text})", computed, op.dtype)


_RANDOM = frozenset({"random", "random_word"})
_YIELDS_BOOL = frozenset("eq ne lt le gt ge isnan isinf signbit logical_not".split()) | _LOGICAL.keys()


def _operation(op: Op, args: list[str], dtype: torch.dtype, kind: str) -> str:
    name = op.name
    suffix = "f" if dtype == torch.float32 else ""
    if name == "where":
        return f"chosen({', '.join(args)})" if dtype.is_floating_point else f"{args[0]} ? {args[1]} : {args[2]}"
    if name in _INFIX:
        text = f"{args[0]} {_INFIX[name]} {args[1]}"
        narrow = name in ("add", "sub", "mul") and kind not in ("float", "double", "int32_t", "int64_t")
        return f"{kind}({text})" if narrow else text  # C computes small integers as int
    if name in _BITWISE:
        return f"{kind}({args[0]} {_BITWISE[name]} {args[1]})"
    if name in _LOGICAL:
        sides = (
            arg if value.dtype == torch.bool else f"({arg} != 0)" for arg, value in zip(args, op.args, strict=True)
        )
        return f"bool({f' {_LOGICAL[name]} '.join(sides)})"
    if name == "div":
        return f"{args[0]} / {args[1]}"
    if name == "fma":
        return f"__builtin_fma{suffix}({', '.join(args)})"
    if name == "neg":
        return f"-{args[0]}" if dtype.is_floating_point else f"{kind}(0 - {args[0]})"
    if name == "reciprocal":
        return f"{constant_text(1, dtype)} / {args[0]}"
    if name == "rsqrt":
        return f"{constant_text(1, dtype)} / sqrt{suffix}({args[0]})"
    if name == "logical_not":
        return f"!{args[0]}"
    if name == "bitwise_not":
        return f"!{args[0]}" if dtype == torch.bool else f"{kind}(~{args[0]})"
    if name == "isnan":
        return f"{args[0]} != {args[0]}"
    if name == "isinf":
        return f"absolute({args[0]}) == {constant_text(math.inf, dtype)}" if dtype.is_floating_point else "false"
    if name in _ROUNDING and not dtype.is_floating_point:
        return args[0]
    if name == "round":
        return f"nearbyint{suffix}({args[0]})"  # halves to even
    limit = as_number(op.args[-1])
    if name in ("maximum", "minimum") and dtype.is_floating_point and limit is not None and limit == limit:
        sign = "<" if name == "maximum" else ">"
        return f"{args[0]} {sign} {args[1]} ? {args[1]} : {args[0]}"  # one comparison, as the limit is not NaN
    if name in _PRELUDE:
        return (
            f"{_PRELUDE[name]}<{kind}>({', '.join(args)})"
            if _templated(name, dtype)
            else (f"{_PRELUDE[name]}({', '.join(args)})")
        )
    assert name in _MATH, f"no C++ for operation {name}"
    return f"{'same_' if name in _SAME else ''}{name}{suffix}({', '.join(args)})"


_CALLED = re.compile(r"\b(same_|)(\w+)\(")
_BEHIND = {"exponential": "exp", "sigmoid": "exp", "error_function": "erf", "power": "pow"}  # functions of prelude.h


def definitions_of(text: str) -> str:
    """Return definitions of the math functions that the text of a kernel calls, to be placed before it."""
    calls = set(_CALLED.findall(text))
    names = {name.removesuffix("f") if name != "erf" else name for same, name in calls if same}
    names |= {_BEHIND[name] for same, name in calls if not same and name in _BEHIND}
    return "".join(f"#ifndef DEFINED_{name}\n#define DEFINED_{name}\nDEFINE_{name}\n#endif\n" for name in sorted(names))


def _templated(name: str, dtype: torch.dtype) -> bool:
    """Whether a call must name its template argument: literals and small integers would deduce `int`."""
    return not dtype.is_floating_point


def calls_library(value: Value) -> bool:
    """Whether computing `value` calls a function of the vector library."""
    if not isinstance(value, Op):
        return False
    return value.name in _CALLS or (value.name in _INLINE_IN_FLOAT32 and value.dtype == torch.float64)


def weight(value: Value) -> int:
    """Return the rough cost of computing `value` once, in additions."""
    if isinstance(value, Scan):
        return _SCAN_WEIGHT
    return HEAVY.get(value.name, 1) if isinstance(value, Op) else 1
