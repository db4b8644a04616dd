"""Norms and their gradients, with inputs and eager torch's results."""

from __future__ import annotations

import torch

from overlapc.ir.body import Body, Load, Store, op
from tests.codegen.case import Case, Tensors
from tests.codegen.terms import (
    bf16,
    f32,
    loop,
    noise,
    number,
    p0,
    p1,
    r0,
    r1,
    total,
)


def rms_norm(rows: int, width: int, dtype: torch.dtype = bf16) -> Case:
    x, w = Load("x", width * p0 + r0, dtype), Load("w", r0, dtype)
    scale = op("rsqrt", op("add", op("mul", total(op("mul", x, x)), number(1 / width)), number(1e-5)))
    stores = (
        Store("y", width * p0 + r0, op("mul", op("mul", x, scale), w), dtype),
        Store("scale", p0, scale, f32),
    )

    def expected(t: Tensors) -> Tensors:
        s = torch.rsqrt(t["x"].float().pow(2).mean(1, keepdim=True) + 1e-5)
        return {"y": t["x"].float() * s * t["w"].float(), "scale": s}

    tensors = {
        "x": noise(rows, width, dtype=dtype),
        "w": noise(width, dtype=dtype),
        "y": torch.zeros(rows, width, dtype=dtype),
        "scale": torch.zeros(rows),
    }
    return Case("rms_norm", Body((loop(p0, rows),), (loop(r0, width),), stores), tensors, expected)


def rms_norm_backward(rows: int, width: int, dtype: torch.dtype = bf16) -> Case:
    x, w, dy = (
        Load(name, index, dtype) for name, index in (("x", width * p0 + r0), ("w", r0), ("dy", width * p0 + r0))
    )
    scale = Load("scale", p0, f32)
    wdy = op("mul", w, dy)
    dot = op("mul", total(op("mul", wdy, x)), number(1 / width))
    cube = op("mul", scale, op("mul", scale, scale))
    dx = op("sub", op("mul", wdy, scale), op("mul", x, op("mul", cube, dot)))

    def expected(t: Tensors) -> Tensors:
        x_, g = t["x"].float(), t["dy"].float() * t["w"].float()
        s = t["scale"][:, None]
        return {"dx": g * s - x_ * s**3 * (g * x_).mean(1, keepdim=True)}

    tensors = {
        "x": noise(rows, width, dtype=dtype),
        "w": noise(width, dtype=dtype),
        "dy": noise(rows, width, dtype=dtype, seed=1),
        "scale": noise(rows).abs(),
        "dx": torch.zeros(rows, width, dtype=dtype),
    }
    body = Body((loop(p0, rows),), (loop(r0, width),), (Store("dx", width * p0 + r0, dx, dtype),))
    return Case("rms_norm_backward", body, tensors, expected)


def norm_gradients(batch: int, rows: int, width: int, dtype: torch.dtype = bf16) -> Case:
    """Gradients of a scaled input, over rows of two loops, and of its weight and bias, as totals of columns."""
    at = rows * width * p0 + width * p1 + r0
    x, g, w = Load("x", at, dtype), Load("g", at, dtype), Load("w", r0, dtype)
    mean = op("mul", total(op("mul", op("mul", g, w), x)), number(1 / width))
    sign = op("where", op("lt", x, number(0.0)), number(-1.0), number(1.0))
    stores = (
        Store("dx", at, op("sub", op("mul", g, w), op("mul", x, mean)), dtype),
        Store("dw", r0, op("mul", g, op("mul", x, mean)), dtype, "sum"),
        Store("db", r0, g, f32, "sum"),
        Store("prod", r0, sign, f32, "prod"),
        Store("signs", r0, sign, f32, "sum", total_dtype=bf16),  # exact until it is rounded
    )

    def expected(t: Tensors) -> Tensors:
        x, g, w = (t[name].double() for name in ("x", "g", "w"))
        mean = (g * w * x).mean(-1, keepdim=True)
        sign = torch.where(x < 0, -1, 1)
        totals = {"dw": (g * x * mean).sum((0, 1)), "db": g.sum((0, 1)), "prod": sign.prod(0).prod(0)}
        return {"dx": g * w - x * mean, **totals, "signs": sign.sum((0, 1)).bfloat16().float()}

    size = (batch, rows, width)
    tensors = {"x": noise(*size, dtype=dtype), "g": noise(*size, dtype=dtype, seed=1), "w": noise(width, dtype=dtype)}
    tensors |= {"dx": torch.empty(size, dtype=dtype), "dw": torch.empty(width, dtype=dtype)}
    tensors |= {name: torch.empty(width) for name in ("db", "prod", "signs")}
    body = Body((loop(p0, batch), loop(p1, rows)), (loop(r0, width),), stores)
    return Case(f"norm_gradients_{width}", body, tensors, expected)


def layer_norm(rows: int, width: int) -> Case:
    x = Load("x", width * p0 + r0, f32)
    mean = op("mul", total(x), number(1 / width))
    centred = op("sub", x, mean)
    variance = op("mul", total(op("mul", centred, centred)), number(1 / width))
    scale = op("rsqrt", op("add", variance, number(1e-5)))
    y = op("add", op("mul", op("mul", centred, scale), Load("w", r0, f32)), Load("b", r0, f32))
    stores = (Store("y", width * p0 + r0, y, f32), Store("mean", p0, mean, f32), Store("scale", p0, scale, f32))

    def expected(t: Tensors) -> Tensors:
        x_ = t["x"].double()
        s = torch.rsqrt(x_.var(1, correction=0, keepdim=True) + 1e-5)
        m = x_.mean(1, keepdim=True)
        return {"y": (x_ - m) * s * t["w"] + t["b"], "mean": m, "scale": s}

    tensors = {
        "x": noise(rows, width) + 3,
        "w": noise(width),
        "b": noise(width, seed=2),
        "y": torch.zeros(rows, width),
        "mean": torch.zeros(rows),
        "scale": torch.zeros(rows),
    }
    return Case("layer_norm", Body((loop(p0, rows),), (loop(r0, width),), stores), tensors, expected)


def group_norm(rows: int, channels: int, pixels: int) -> Case:
    """A norm of rows of two loops, whose scale and shift depend only on the outer one."""
    at = channels * pixels * p0 + pixels * r0 + r1
    x = Load("x", at, bf16)
    mean = op("mul", total(x), number(1 / (channels * pixels)))
    y = op("add", op("mul", op("sub", x, mean), Load("w", r0, bf16)), Load("b", r0, f32))
    tensors = {
        "x": noise(rows, channels, pixels, dtype=bf16),
        "w": noise(channels, dtype=bf16),
        "b": noise(channels, seed=1),
        "y": torch.zeros(rows, channels, pixels),
    }

    def expected(t: Tensors) -> Tensors:
        x_ = t["x"].float()
        return {"y": (x_ - x_.mean((1, 2), keepdim=True)) * t["w"].float()[:, None] + t["b"][:, None]}

    body = Body((loop(p0, rows),), (loop(r0, channels), loop(r1, pixels)), (Store("y", at, y, f32),))
    return Case("group_norm", body, tensors, expected)


def moments(rows: int, batch: int, pixels: int, dtype: torch.dtype = f32) -> Case:
    """Mean, variance and normalized pixels of every channel, as in a batch norm, with a mean far from 0."""
    count = number(float(batch * pixels))
    at = (r0 * rows + p0) * pixels + r1
    x = Load("x", at, dtype)
    mean = op("div", total(x), count)
    distance = op("sub", x, mean)
    variance = op("div", total(op("mul", distance, distance)), count)
    stores = (
        Store("y", at, op("mul", distance, op("rsqrt", variance)), dtype),
        Store("mean", p0, mean, f32),
        Store("variance", p0, variance, f32),
    )
    tensors = {"x": (noise(batch, rows, pixels) + 20).to(dtype), "y": torch.zeros(batch, rows, pixels, dtype=dtype)}
    tensors |= {"mean": torch.zeros(rows), "variance": torch.zeros(rows)}

    def expected(t: Tensors) -> Tensors:
        x_ = t["x"].double()
        variance, mean = torch.var_mean(x_, (0, 2), correction=0)
        return {"y": (x_ - mean[:, None]) * variance.rsqrt()[:, None], "mean": mean, "variance": variance}

    return Case("moments", Body((loop(p0, rows),), (loop(r0, batch), loop(r1, pixels)), stores), tensors, expected)
