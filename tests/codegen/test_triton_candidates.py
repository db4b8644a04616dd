"""Tilings that are measured beside the heuristic one: correct each, around it, and few."""

from __future__ import annotations

from pathlib import Path

import pytest
import triton

from overlapc.codegen.triton import TritonGenerator
from tests.codegen.scan_cases import scan_cases
from tests.codegen.triton_cases import Case, small, tilings_to_measure

CASES = small() + scan_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_equal_eager_in_each(case: Case, tmp_path: Path):
    generator = TritonGenerator()
    others = tilings_to_measure(case)[1:]
    sources = {each: generator.generate(case.body, case.name, tiling=each) for each in others}
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        launchers = generator.load(list(sources.values()), tmp_path)
        wrong = {each: case.run(launchers[source.name], source, "cpu") for each, source in sources.items()}
    assert not any(wrong.values()), {each: problems for each, problems in wrong.items() if problems}
