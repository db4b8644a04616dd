"""Reductions that share a pass over a row: which are joined, and the form by which they are recognized."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch
import torch.nn.functional as F
import triton
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from overlapc.codegen.triton import TritonGenerator
from overlapc.codegen.triton.accumulate import Moments, Plain
from overlapc.codegen.triton.levels import accumulations
from overlapc.codegen.triton.tiling import Tiling
from overlapc.ir.body import Body, Cast, Index, Load, Reduce, Store, Value, op
from tests.codegen.interpreted import triton_on_cpu
from tests.codegen.terms import f32, i64, loop, number, p0, r0, s0, total
from tests.lowering.against_eager import compiled


def variance(divisor: Value, length: int | sympy.Expr = 40, bounded: bool = False) -> Body:
    """Return a body that sums squared distances from sum(x) / `divisor`, clamped to the range of x if `bounded`."""
    x = Load("x", length * p0 + r0, f32)
    mean = op("div", total(x), divisor)
    if bounded:
        mean = op("minimum", op("maximum", mean, Reduce("min", x, f32)), Reduce("max", x, f32))
    distance = op("sub", x, mean)
    return Body((loop(p0, 3),), (loop(r0, length),), (Store("y", p0, total(op("mul", distance, distance)), f32),))


@pytest.mark.parametrize(
    "body",
    [variance(number(40.0)), variance(Cast(Index(s0, i64), f32), s0), variance(number(40.0), bounded=True)],
    ids=["40", "s0", "bounded"],
)
def test_squared_distances_from_the_mean_are_accumulated_with_the_sum(body: Body):
    ((both,),) = accumulations(body, True, torch.int32)
    assert isinstance(both, Moments)
    assert len(accumulations(body, False, torch.int32)) == 2


@pytest.mark.parametrize(
    "body", [variance(number(39.0)), variance(Cast(Index(s0, i64), f32)), variance(number(40.0), s0)]
)
def test_squared_distances_from_another_value_need_a_second_pass(body: Body):
    first, second = accumulations(body, True, torch.int32)
    assert all(isinstance(one, Plain) for one in (*first, *second))


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(seed=0, length=3, form="looped", rblock=8, far=1e20)
@given(
    seed=st.integers(0, 9),
    length=st.integers(2, 60),
    form=st.sampled_from(["looped", "split"]),
    rblock=st.sampled_from([2, 8, 32]),
    far=st.sampled_from([0.0, 100.0, 1e20]),  # the square of 1e20 overflows float32
)
def test_moments_of_lanes_with_few_or_no_elements_are_joined_exactly(
    seed: int, length: int, form: str, rblock: int, far: float, tmp_path: Path
):
    body = variance(number(float(length)), length)
    tiling = Tiling(form, body.loops, 2, 1, r=body.reduction, rblock=rblock, splits=4 if form == "split" else 1)
    generator = TritonGenerator()
    source = generator.generate(body, "variance", tiling=tiling)
    x = torch.randn(3, length, generator=torch.Generator().manual_seed(seed)) + far
    tensors = {"x": x, "y": torch.zeros(3)}
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        generator.load([source], tmp_path)[source.name](*(tensors[buffer] for buffer in source.buffers))
    squares = x.double().var(1, correction=0) * length
    torch.testing.assert_close(tensors["y"].double(), squares, rtol=1e-4, atol=1e-6)


def test_a_batch_norm_reads_its_input_twice(tmp_path: Path):
    x = torch.randn(2, 1, 17_000) * 3 + 50
    with triton_on_cpu():
        found = compiled(
            lambda x: F.batch_norm(x, None, None, training=True), cache_dir=str(tmp_path), profile="cpu-gloo"
        )(x)
    torch.testing.assert_close(found, F.batch_norm(x.double(), None, None, training=True).float(), atol=1e-4, rtol=1e-4)
    (source,) = [text for path in tmp_path.rglob("*.py") if "ops.moments" in (text := path.read_text())]
    assert source.count("for r_start in") == 2  # for the statistics, and to normalize
