"""Kernels that must compute the same in C++ as in Triton: cases of the Triton tests, compiled for the CPU."""

from __future__ import annotations

import pytest

from overlapc.codegen.cpp import CppGenerator
from tests.codegen.triton_ops import Case, atomics, bitcasts, random_numbers


@pytest.mark.parametrize("case", [random_numbers(), bitcasts(), atomics()], ids=lambda case: case.name)
def test_cpp_gives_the_numbers_that_triton_gives(case: Case, tmp_path):
    generator = CppGenerator()
    source = generator.generate(case.body, case.name)
    problems = case.run(generator.load([source], tmp_path)[source.name], source, "cpu")
    assert not problems, "\n".join(problems)
