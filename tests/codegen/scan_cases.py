"""Bodies with scans, for both generators: every kind and dtype, along rows and columns, with reductions."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from overlapc.ir.body import Body, Cast, Constant, Load, Scan, Store, Value, op
from tests.codegen.case import Case, Tensors
from tests.codegen.terms import bf16, boolean, f16, f32, f64, i8, i32, i64, loop, noise, p0, r0, r1, s0, total, u8


def scans(rows: int, width: int, dtype: torch.dtype) -> Case:
    """Every scan in one kernel, over ties and special values."""
    x = Load("x", width * p0 + r0, dtype)
    real = dtype.is_floating_point
    parts: dict[str, tuple[Scan, torch.dtype]] = {}
    for kind in ("max", "min"):
        parts[kind] = Scan(kind, x, x.dtype, r0), dtype
        parts[f"arg{kind}"] = Scan(f"arg{kind}", x, i64, r0), i64
    for kind in ("sum", "prod"):
        wide = x if real else Cast(x, i64)
        parts[kind] = Scan(kind, wide, wide.dtype, r0), dtype if real else i64
    if real:
        parts["logsumexp"] = Scan("logsumexp", x, x.dtype, r0), dtype
    stores = tuple(Store(name, width * p0 + r0, value, memory) for name, (value, memory) in parts.items())
    tensors = {"x": scan_input(rows, width, dtype)}
    tensors |= {name: torch.zeros(rows, width, dtype=memory) for name, (_, memory) in parts.items()}

    def expected(t: Tensors) -> Tensors:
        x_ = t["x"].float() if t["x"].dtype in (bf16, f16) else t["x"]
        largest, smallest = x_.cummax(1), x_.cummin(1)
        found = {"max": largest.values, "argmax": largest.indices, "min": smallest.values, "argmin": smallest.indices}
        found |= {"sum": x_.cumsum(1), "prod": x_.cumprod(1)}
        return found | ({"logsumexp": x_.logcumsumexp(1)} if real else {})

    return Case(f"scans_{str(dtype)[6:]}", Body((loop(p0, rows),), (loop(r0, width),), stores), tensors, expected)


def scan_input(rows: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return input with ties in every row, and for floats with infinities and NaNs in separate rows."""
    if dtype is boolean:
        return torch.arange(rows * width).reshape(rows, width) % 3 == 1
    if not dtype.is_floating_point:
        return (torch.arange(rows * width).reshape(rows, width) * 7 % 5 + 1).to(dtype)
    x = (1 + noise(rows, width).mul(0.1)).mul(8).round().div(8)
    x[0, 4], x[0, 6] = math.nan, math.nan
    x[1, 3], x[1, 5] = math.inf, math.inf
    x[2, :2] = -math.inf
    x[3] = -math.inf
    return x.to(dtype)


def long_scans(width: int, dtype: torch.dtype) -> Case:
    """Rows of several blocks: random, rising, falling, constant, with a NaN inside, zeros of both signs, and others."""
    case = scans(8, width, dtype)
    up = torch.arange(width)
    real = dtype.is_floating_point
    case.tensors["x"] = torch.stack(
        [
            noise(width).mul(50),
            up - width // 2,
            width // 2 - up,
            torch.full((width,), 3),
            torch.where(up == width // 3, math.nan if real else 7, noise(width)),
            torch.where(up % 3 == 0, -0.0, 0.0),
            up.mul(7).remainder(11).add(up // 300),
            torch.where(up > width // 2, -math.inf if real else 0, 2.0),
        ]
    ).to(dtype)
    return replace(case, name=f"long_{case.name}")


def scan_of_columns(rows: int, width: int) -> Case:
    """Scans down the columns of a row-major matrix, whose columns are the contiguous dim."""
    x = Load("x", width * r0 + p0, f32)
    ones = Constant(1.0, f32)
    stores = (
        Store("y", width * r0 + p0, op("mul", Scan("sum", op("exp", x), f32, r0), x), f32),
        Store("at", width * r0 + p0, Scan("argmax", x, i64, r0), i64),
        Store("count", width * r0 + p0, Scan("sum", ones, f32, r0), f32),
    )
    tensors = {"x": noise(rows, width), "y": torch.zeros(rows, width), "at": torch.zeros(rows, width, dtype=i64)}
    tensors["count"] = torch.zeros(rows, width)

    def expected(t: Tensors) -> Tensors:
        count = torch.ones_like(t["x"]).cumsum(0)
        return {"y": t["x"].exp().cumsum(0) * t["x"], "at": t["x"].cummax(0).indices, "count": count}

    return Case("scan_of_columns", Body((loop(p0, width),), (loop(r0, rows),), stores), tensors, expected)


def nucleus(rows: int, width: int) -> Case:
    """Top-p sampling of sorted logits: the scan reads a reduction, and another reduction reads the scan."""
    x = Load("x", width * p0 + r0, f32)
    exp = op("exp", x)
    mass = Scan("sum", op("div", exp, total(exp)), f32, r0)
    kept = op("where", op("lt", mass, Constant(0.9, f32)), mass, Constant(0.0, f32))
    stores = (Store("y", width * p0 + r0, kept, f32), Store("total", p0, total(kept), f32))
    tensors = {"x": noise(rows, width), "y": torch.zeros(rows, width), "total": torch.zeros(rows)}

    def expected(t: Tensors) -> Tensors:
        mass = t["x"].double().softmax(1).cumsum(1)
        kept = torch.where(mass < 0.9, mass, 0.0)
        return {"y": kept, "total": kept.sum(1)}

    return Case("nucleus", Body((loop(p0, rows),), (loop(r0, width),), stores), tensors, expected)


def scan_of_a_scan(rows: int, outer: int, inner: int) -> Case:
    """A scan of a scan over two loops, as if fusion had split one, of a transposed tensor."""
    at = inner * r0 + r1
    x = Load("x", rows * at + p0, f32)
    once = Scan("sum", x, f32, at)
    value: Value = Scan("max", once, f32, at)
    stores = (
        Store("y", outer * inner * p0 + at, value, f32),
        Store("at", rows * at + p0, Scan("argmin", x, i64, at), i64),
    )
    tensors = {
        "x": noise(outer * inner, rows),
        "y": torch.zeros(rows, outer * inner),
        "at": torch.zeros(outer * inner, rows, dtype=i64),
    }

    def expected(t: Tensors) -> Tensors:
        y = t["x"].cumsum(0).cummax(0).values.t().contiguous()
        return {"y": y, "at": t["x"].cummin(0).indices}

    body = Body((loop(p0, rows),), (loop(r0, outer), loop(r1, inner)), stores)
    return Case("scan_of_a_scan", body, tensors, expected)


def scan_in_place(rows: int, width: int) -> Case:
    """The scan of a row overwrites the row, and is scanned again."""
    x = Load("x", width * p0 + r0, f32)
    once = Scan("sum", x, f32, r0)
    stores = (Store("x", width * p0 + r0, once, f32), Store("y", width * p0 + r0, Scan("sum", once, f32, r0), f32))
    body = Body((loop(p0, rows),), (loop(r0, width),), stores)
    tensors = {"x": noise(rows, width), "y": torch.zeros(rows, width)}
    return Case("scan_in_place", body, tensors, lambda t: {"x": t["x"].cumsum(1), "y": t["x"].cumsum(1).cumsum(1)})


def symbolic_scan(rows: int, width: int) -> Case:
    """A scan of symbolic length."""
    x = Load("x", s0 * p0 + r0, f32)
    body = Body((loop(p0, rows),), (loop(r0, s0),), (Store("y", s0 * p0 + r0, Scan("sum", x, f32, r0), f32),))
    tensors = {"x": noise(rows, width), "y": torch.zeros(rows, width)}
    return Case("symbolic_scan", body, tensors, lambda t: {"y": t["x"].double().cumsum(1)}, {"s0": width})


def large_scan_cases() -> list[Case]:
    """Return scans in sizes for a GPU: rows in one tile and in several."""
    return [
        *(scans(50, 3000, dtype) for dtype in (f32, f64, i64)),
        scans(8, 100_000, i64),
        scan_of_columns(3000, 200),
        nucleus(64, 32_000),
        scan_of_a_scan(30, 40, 50),
        scan_in_place(3, 200_000),
        symbolic_scan(30, 100_000),
    ]


def scan_cases() -> list[Case]:
    """Return small scans, none of whose sizes a tile divides."""
    return [
        *(scans(5, 21, dtype) for dtype in (f32, f64, bf16, f16, i64, i32, i8, u8, boolean)),
        scan_of_columns(40, 20),
        nucleus(5, 37),
        scan_of_a_scan(3, 4, 5),
        scan_in_place(3, 100),
        symbolic_scan(3, 37),
    ]
