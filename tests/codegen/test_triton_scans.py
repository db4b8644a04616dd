"""Scans of rows divided among programs are exact for any number of rows and programs, any length and tile."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from overlapc.codegen.triton import TritonGenerator
from overlapc.codegen.triton.tiling import Tiling
from overlapc.ir.body import Body, Load, Reduce, Scan, Store
from tests.codegen.interpreted import interpreting
from tests.codegen.terms import i64, loop, p0, r0


def counted(rows: int, length: int) -> Body:
    """Return a body with a cumulative sum, indices of the cumulative maximum, their cumulative sum and its maximum."""
    x = Load("x", length * p0 + r0, i64)
    place = Scan("argmax", x, i64, r0)
    again = Scan("sum", place, i64, r0)
    scans = {"total": Scan("sum", x, i64, r0), "place": place, "again": again}
    stores = [Store(name, length * p0 + r0, value, i64) for name, value in scans.items()]
    stores.append(Store("largest", p0, Reduce("max", again, i64), i64))
    return Body((loop(p0, rows),), (loop(r0, length),), tuple(stores))


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 3),
    length=st.integers(1, 60),
    xblock=st.sampled_from([1, 2]),
    rblock=st.sampled_from([2, 8, 32]),
    splits=st.sampled_from([2, 4]),
    seed=st.integers(0, 100),
)
def test_every_division_among_programs_equals_eager(
    rows: int, length: int, xblock: int, rblock: int, splits: int, seed: int, tmp_path: Path
):
    body = counted(rows, length)
    tiling = Tiling("split", body.loops, xblock, 1, r=body.reduction, rblock=rblock, splits=splits)
    generator = TritonGenerator()
    source = generator.generate(body, "counted", tiling=tiling)
    x = torch.randint(-3, 4, (rows, length), generator=torch.Generator().manual_seed(seed))
    found = {name: torch.zeros(rows, length, dtype=i64) for name in ("total", "place", "again")}
    found |= {"x": x, "largest": torch.zeros(rows, dtype=i64)}
    with interpreting():
        launcher = generator.load([source], tmp_path)[source.name]
        launcher(*(found[buffer] for buffer in source.buffers))
    place = x.cummax(1).indices
    expected = {"total": x.cumsum(1), "place": place, "again": place.cumsum(1), "largest": place.cumsum(1).amax(1)}
    for name, want in expected.items():
        assert torch.equal(found[name], want), name


def test_scans_are_stored_in_the_last_pass_over_the_row():
    """So a scan may overwrite its input (ir/hazards.py), which earlier passes read again."""
    source = TritonGenerator().generate(
        counted(3, 90), "counted", tiling=Tiling("split", (loop(p0, 3),), 1, 1, r=(loop(r0, 90),), rblock=8, splits=2)
    )
    *before, last = source.text.split("\n@triton.jit\n")[1:]
    passes = [text for text in before if "for r_start in" in text]
    assert ["tl.store(out" in text for text in passes] == [False] * (len(passes) - 1) + [True]
    assert "for r_start in" not in last
    assert "tl.store(out" in last
