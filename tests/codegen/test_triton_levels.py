"""Reductions that share a pass: which are joined, and that what they come from has the form they are known by."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch
import torch.nn.functional as F

from overlapc.codegen.triton.accumulate import Moments, Plain
from overlapc.codegen.triton.levels import accumulations
from overlapc.ir.body import Body, Cast, Index, Load, Store, Value, op
from tests.codegen.interpreted import triton_on_cpu
from tests.codegen.terms import f32, i64, loop, number, p0, r0, s0, total
from tests.lowering.compare import compiled


def variance(divisor: Value, length: int | sympy.Expr = 40) -> Body:
    """Squared distances from the sum over `divisor`."""
    x = Load("x", length * p0 + r0, f32)
    distance = op("sub", x, op("div", total(x), divisor))
    return Body((loop(p0, 3),), (loop(r0, length),), (Store("y", p0, total(op("mul", distance, distance)), f32),))


@pytest.mark.parametrize("body", [variance(number(40.0)), variance(Cast(Index(s0, i64), f32), s0)], ids=["40", "s0"])
def test_distances_from_the_mean_are_accumulated_with_the_sum(body: Body):
    ((both,),) = accumulations(body, True, torch.int32)
    assert isinstance(both, Moments)
    assert [len(level) for level in accumulations(body, False, torch.int32)] == [1, 1]


@pytest.mark.parametrize(
    "body", [variance(number(39.0)), variance(Cast(Index(s0, i64), f32)), variance(number(40.0), s0)]
)
def test_distances_from_anything_else_wait_for_the_sum(body: Body):
    first, second = accumulations(body, True, torch.int32)
    assert all(isinstance(one, Plain) for one in (*first, *second))


def test_a_batch_norm_reads_its_input_twice(tmp_path: Path):
    x = torch.randn(2, 1, 17_000) * 3 + 50
    with triton_on_cpu():
        found = compiled(
            lambda x: F.batch_norm(x, None, None, training=True), cache_dir=str(tmp_path), profile="cpu-gloo"
        )(x)
    torch.testing.assert_close(found, F.batch_norm(x.double(), None, None, training=True).float(), atol=1e-4, rtol=1e-4)
    (source,) = [text for path in tmp_path.rglob("*.py") if "ops.moments" in (text := path.read_text())]
    assert source.count("for r_start in") == 2  # the statistics, then what is normalized by them
