"""Short names for writing loop bodies in tests: symbols, dtypes, constants, sums."""

from __future__ import annotations

import sympy
import torch

from overlapc.ir.body import Constant, Loop, Reduce, Value
from overlapc.ir.indexing import loop_symbol

p0, p1, p2 = (loop_symbol("p", at) for at in range(3))
r0, r1 = (loop_symbol("r", at) for at in range(2))
i0, i1 = (loop_symbol("i", at) for at in range(2))
s0, s1 = (sympy.Symbol(name, integer=True, positive=True) for name in ("s0", "s1"))
f32, f64, bf16, f16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
i64, i32, u8, i8, boolean = torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool


def loop(symbol: sympy.Symbol, size: int | sympy.Expr) -> Loop:
    return Loop(symbol, sympy.sympify(size))


def number(value: float, dtype: torch.dtype = f32) -> Constant:
    return Constant(value, dtype)


def noise(*shape: int, dtype: torch.dtype = f32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + 7 * len(shape) + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def total(value: Value) -> Reduce:
    return Reduce("sum", value, value.dtype)
