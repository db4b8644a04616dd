"""The text of loop bodies: every kind of line of the format."""

from __future__ import annotations

import torch

from overlapc.ir.body import Body, Cast, Constant, Index, Load, Reduce, Store, op
from overlapc.ir.indexing import loop_symbol
from tests.ir.bodies import P, R, loops_of, put, x


def test_the_text_of_a_softmax_has_loops_values_and_stores() -> None:
    element = x("a", 8 * P[0] + R[0])
    exponential = op("exp", op("sub", element, Reduce("max", element, torch.float32)))
    total = Reduce("sum", exponential, torch.float32)
    body = Body(
        loops_of("p", (4,)),
        loops_of("r", (8,)),
        (put("y", 8 * P[0] + R[0], op("div", exponential, total)), put("sums", P[0], total)),
    )
    assert str(body).splitlines() == [
        "for p0 < 4, reduce r0 < 8",
        "  %0 = load a[8*p0 + r0]: f32",
        "  %1 = reduce max %0: f32",
        "  %2 = sub %0, %1: f32",
        "  %3 = exp %2: f32",
        "  %4 = reduce sum %3: f32",
        "  %5 = div %3, %4: f32",
        "  store y[8*p0 + r0]: f32 = %5",
        "  outer store sums[p0]: f32 = %4",
    ]


def test_the_text_has_masks_indirect_loads_casts_and_atomic_stores() -> None:
    where = loop_symbol("i", 0)
    row = Load("rows", P[0], torch.int64)
    mask = op("lt", Index(P[0]), Constant(3, torch.int64))
    value = Cast(Load("table", where, torch.bfloat16, mask, ((where, row),)), torch.float16)
    body = Body(loops_of("p", (4,)), (), (Store("y", where, value, torch.float32, "add", None, ((where, row),)),))
    assert str(body).splitlines() == [
        "for p0 < 4",
        "  %0 = load rows[p0]: i64",
        "  %1 = index p0: i64",
        "  %2 = lt %1, 3: bool",
        "  %3 = load table[i0]: bf16, i0=%0, if %2",
        "  %4 = cast %3: f16",
        "  store add y[i0]: f32 = %4, i0=%0",
    ]


def test_a_body_without_loops_runs_once() -> None:
    assert str(Body((), (), (put("y", 0, x("a", 0)),))).startswith("once\n")
