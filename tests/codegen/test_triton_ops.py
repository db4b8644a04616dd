"""Every operation and conversion equals eager torch in Triton's interpreter, over special values."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapc.codegen.triton import TritonGenerator
from overlapc.ir.body import OPERATIONS
from tests.codegen.case import Case
from tests.codegen.interpreted import interpreting
from tests.codegen.triton_ops import BINARY, UNARY, all_cases


def test_the_tables_cover_the_ir():
    assert set(UNARY) | set(BINARY) | {"where", "bitcast", "random", "random_word", "fma"} == set(OPERATIONS)


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_operations_equal_eager(case: Case, tmp_path: Path):
    generator = TritonGenerator()
    assert generator.refuse(case.body) is None
    source = generator.generate(case.body, case.name)
    with interpreting():
        problems = case.run(generator.load([source], tmp_path)[source.name], source, "cpu")
    assert not problems, "\n".join(problems)
