"""Bodies with pairs of loads and stores that are interleaved in memory: along elements, columns and rows."""

from __future__ import annotations

import torch

from overlapc.ir.body import Body, Load, Store, op
from tests.codegen.case import Case, Tensors
from tests.codegen.terms import bf16, f32, loop, noise, p0, p1, r0, total


def gate_and_up(rows: int, width: int) -> Case:
    """A gated product of interleaved parts with a bias, and both parts swapped."""
    at = 2 * width * p0 + 2 * p1
    gate, up = (op("add", Load("x", at + part, bf16), Load("bias", 2 * p1 + part, f32)) for part in (0, 1))
    stores = (
        Store("y", width * p0 + p1, op("mul", gate, up), f32),
        Store("swapped", at, up, bf16),
        Store("swapped", at + 1, gate, bf16),
    )
    tensors = {
        "x": noise(rows, 2 * width, dtype=bf16),
        "bias": noise(2 * width),
        "y": torch.empty(rows, width),
        "swapped": torch.empty(rows, 2 * width, dtype=bf16),
    }

    def expected(t: Tensors) -> Tensors:
        gate, up = (t["x"].float() + t["bias"]).view(rows, width, 2).unbind(-1)
        return {"y": gate * up, "swapped": torch.stack((up, gate), -1).view(rows, 2 * width)}

    return Case("gate_and_up", Body((loop(p0, rows), loop(p1, width)), (), stores), tensors, expected)


def gradients_and_columns(rows: int, width: int) -> Case:
    """A gradient multiplied by the other part of each pair, and the sums of its columns."""
    at = 2 * width * r0 + 2 * p0
    one, other = (op("mul", Load("g", width * r0 + p0, f32), Load("x", at + part, bf16)) for part in (1, 0))
    stores = (
        Store("dx", at, one, bf16),
        Store("dx", at + 1, other, bf16),
        Store("db", 2 * p0, total(one), f32),
        Store("db", 2 * p0 + 1, total(other), f32),
    )
    tensors = {
        "x": noise(rows, 2 * width, dtype=bf16),
        "g": noise(rows, width),
        "dx": torch.empty(rows, 2 * width, dtype=bf16),
        "db": torch.empty(2 * width),
    }

    def expected(t: Tensors) -> Tensors:
        swapped = t["x"].float().view(rows, width, 2).flip(-1) * t["g"][..., None]
        return {"dx": swapped.view(rows, 2 * width), "db": swapped.view(rows, 2 * width).sum(0)}

    return Case("gradients_and_columns", Body((loop(p0, width),), (loop(r0, rows),), stores), tensors, expected)


def length_of_pairs(rows: int, width: int) -> Case:
    """Complex numbers divided by the norm of their row."""
    at = 2 * width * p0 + 2 * r0
    real, imaginary = (Load("x", at + part, f32) for part in (0, 1))
    length = op("sqrt", total(op("add", op("mul", real, real), op("mul", imaginary, imaginary))))
    stores = tuple(Store("y", at + part, op("div", x, length), f32) for part, x in enumerate((real, imaginary)))
    tensors = {"x": noise(rows, 2 * width), "y": torch.empty(rows, 2 * width)}

    def expected(t: Tensors) -> Tensors:
        return {"y": t["x"] / t["x"].norm(dim=1, keepdim=True)}

    return Case("length_of_pairs", Body((loop(p0, rows),), (loop(r0, width),), stores), tensors, expected)
