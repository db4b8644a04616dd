"""Every kind of reduction over rows, with values and shapes that are error-prone."""

from __future__ import annotations

import math

import sympy
import torch

from overlapc.ir.body import Body, Cast, Index, Load, Reduce, Store, Value, op
from overlapc.lowering.topk import largest_of
from tests.codegen.case import Case, Tensors
from tests.codegen.terms import (
    bf16,
    boolean,
    f16,
    f32,
    i64,
    loop,
    noise,
    p0,
    r0,
    r1,
    total,
)


def norm_and_scale(count: int) -> Case:
    """All elements divided by their norm: a store in the loops reads a reduction over all elements."""
    x = Load("x", r0, f32)
    norm = op("sqrt", total(op("mul", x, x)))
    stores = (Store("y", r0, op("div", x, norm), f32), Store("norm", sympy.S.Zero, norm, f32))
    tensors = {"x": noise(count), "y": torch.zeros(count), "norm": torch.zeros(1)}

    def expected(t: Tensors) -> Tensors:
        return {"y": t["x"].double() / t["x"].double().norm(), "norm": t["x"].double().norm()}

    return Case("norm_and_scale", Body((), (loop(r0, count),), stores), tensors, expected)


def reductions(rows: int, width: int, dtype: torch.dtype) -> Case:
    """Every reduction in one kernel, over special values and ties."""
    x = Load("x", width * p0 + r0, dtype)
    kinds = ["max", "min", "argmax", "argmin", "any", "all"] + ([] if dtype is boolean else ["sum", "prod"])
    stores, tensors = [], {"x": reduction_input(rows, width, dtype)}
    for kind in kinds:
        arg: Value = x
        result = x.dtype
        if kind.startswith("arg"):
            result = i64
        elif kind in ("any", "all"):
            arg, result = Cast(x, boolean), boolean
        elif kind in ("sum", "prod") and not dtype.is_floating_point:
            arg, result = Cast(x, i64), i64
        memory = result if result in (i64, boolean) else dtype
        stores.append(Store(kind, p0, Reduce(kind, arg, result), memory))
        tensors[kind] = torch.zeros(rows, dtype=memory)

    def expected(t: Tensors) -> Tensors:
        x_ = t["x"].float() if t["x"].dtype in (bf16, f16) else t["x"]
        found = {"max": x_.amax(1), "min": x_.amin(1), "any": x_.bool().any(1), "all": x_.bool().all(1)}
        narrow = x_.to(torch.int32) if x_.dtype is boolean else x_
        found |= {"argmax": first(narrow, largest=True), "argmin": first(narrow, largest=False)}
        if dtype is not boolean:
            found |= {"sum": x_.sum(1), "prod": x_.prod(1)}
        return found

    body = Body((loop(p0, rows),), (loop(r0, width),), tuple(stores))
    return Case(f"reductions_{str(dtype)[6:]}", body, tensors, expected)


def largest(rows: int, width: int, count: int) -> Case:
    """The `count` largest elements of every row and their indices, over special values."""
    stores: list[Store] = []
    for at, (value, place) in enumerate(largest_of(Load("x", width * p0 + r0, f32), Index(r0), width, count)):
        stores += [Store("y", count * p0 + at, value, f32), Store("at", count * p0 + at, place, i64)]
    tensors = {"x": torch.randperm(rows * width).reshape(rows, width).float() - rows * width // 2}
    tensors["x"][0, :2] = torch.tensor([-math.inf, math.inf])
    tensors["x"][1, 3] = math.nan
    tensors |= {"y": torch.zeros(rows, count), "at": torch.zeros(rows, count, dtype=i64)}

    def expected(t: Tensors) -> Tensors:
        found = t["x"].topk(count)
        return {"y": found.values, "at": found.indices}

    body = Body((loop(p0, rows),), (loop(r0, width),), tuple(stores))
    return Case(f"largest_{count}_of_{width}", body, tensors, expected, tolerance=0)


def first(x: torch.Tensor, largest: bool) -> torch.Tensor:
    """Return the position of the first NaN, else of the first extreme value (torch does not define ties)."""
    best = x.amax(1, keepdim=True) if largest else x.amin(1, keepdim=True)
    hit = (x == best) | (x.isnan() if x.is_floating_point() else False)
    return hit.to(torch.int32).argmax(1)


def reduction_input(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype is boolean:
        x = torch.arange(rows * width).reshape(rows, width) % 3 == 0
        x[0], x[1] = True, False
        return x
    if not dtype.is_floating_point:
        x = (torch.arange(rows * width).reshape(rows, width) * 7 % 5 + 1).to(dtype)
        x[0, 2], x[1] = 0, 3
        return x
    x = 1 + noise(rows, width, dtype=f32).mul(0.1)
    x[0, 4], x[0, 6] = math.nan, math.nan
    x[1, 3], x[1, 5] = math.inf, math.inf
    x[2, 3], x[2, 4] = -math.inf, -math.inf
    x[3] = -math.inf
    return x.to(dtype)


def two_reduction_loops(channels: int, batch: int, pixels: int) -> Case:
    """The sum of every channel of NCHW: one reduction loop outside and one inside of the parallel loop in memory."""
    x = Load("x", channels * pixels * r0 + pixels * p0 + r1, f32)
    body = Body((loop(p0, channels),), (loop(r0, batch), loop(r1, pixels)), (Store("y", p0, total(x), f32),))
    tensors = {"x": noise(batch, channels, pixels), "y": torch.zeros(channels)}
    return Case("two_reduction_loops", body, tensors, lambda t: {"y": t["x"].double().sum((0, 2))})


def empty_rows(rows: int) -> Case:
    """A reduction over no elements, which gives its neutral element."""
    x = Load("x", r0, f32)
    stores = (Store("sum", p0, total(x), f32), Store("max", p0, Reduce("max", x, f32), f32))
    tensors = {"x": torch.zeros(0), "sum": torch.ones(rows), "max": torch.ones(rows)}
    body = Body((loop(p0, rows),), (loop(r0, 0),), stores)

    def expected(t: Tensors) -> Tensors:
        return {"sum": torch.zeros_like(t["sum"]), "max": torch.full_like(t["max"], -math.inf)}

    return Case("empty_rows", body, tensors, expected)
