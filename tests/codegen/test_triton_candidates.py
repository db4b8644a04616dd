"""The tilings that are measured besides the heuristic one: all correct, similar to it, and few."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from overlapc.codegen.triton import TritonGenerator
from overlapc.codegen.triton.candidates import MOST
from tests.codegen.case import Case
from tests.codegen.interpreted import interpreting
from tests.codegen.product_cases import plain
from tests.codegen.scan_cases import scan_cases
from tests.codegen.terms import bf16
from tests.codegen.triton_cases import large, small
from tests.codegen.triton_forms import tilings_to_measure

# Without the case of two thousand programs that total 64 rows, which takes the interpreter a minute.
CASES = [case for case in small() if case.name != "norm_gradients_64"] + scan_cases()[:2]
with FakeTensorMode():  # only loops are used; real tensors would take seconds and 1.5 GB when tests are collected
    LARGE = [*large(), plain("narrow", 4096, 4096, 4096, bf16)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_equal_eager_in_every_tiling(case: Case, tmp_path: Path):
    generator = TritonGenerator()
    others = tilings_to_measure(case)[1:]
    sources = {each: generator.generate(case.body, case.name, tiling=each) for each in others}
    with interpreting():
        launchers = generator.load(list(sources.values()), tmp_path)
        wrong = {each: case.run(launchers[source.name], source, "cpu") for each, source in sources.items()}
    assert not any(wrong.values()), {each: problems for each, problems in wrong.items() if problems}


def test_large_kernels_have_a_few_tilings_besides_the_chosen_one():
    for case in LARGE:
        chosen, *others = tilings_to_measure(case)
        assert 3 <= len(others) < MOST, case.name
        assert chosen not in others
        for each in others:
            loops = [*each.grid, *each.z, *each.y, *each.x, *each.r]
            assert sorted(map(str, loops)) == sorted(map(str, (*case.body.loops, *case.body.reduction)))
            blocks = (each.xblock, each.yblock, each.zblock, each.rblock, each.num_warps)
            assert all(block > 0 and block & (block - 1) == 0 for block in blocks)
            assert each.num_warps <= 32


def test_long_rows_are_tried_as_a_whole_in_loops_and_split_among_programs():
    found = {case.name: {each.form for each in tilings_to_measure(case)} for case in LARGE if case.body.reduction}
    assert found["rms_norm"] == {"persistent", "looped"}
    assert found["two_reduction_loops"] == {"persistent", "looped", "split"}
    assert found["norm_and_scale"] == {"split", "looped"}
