"""Bodies that scan, in C++, against eager torch."""

from __future__ import annotations

import pytest

from overlapc.codegen.cpp import CppGenerator
from tests.codegen.case import Case
from tests.codegen.cpp_kernels import Kernels
from tests.codegen.scan_cases import scan_cases, scans, symbolic_scan
from tests.codegen.terms import boolean, f32, i64

# Longer than a block, and enough rows for threads.
CASES = [*scan_cases(), *(scans(70, 5000, dtype) for dtype in (f32, i64, boolean))]
CASES.append(symbolic_scan(2, 100_000))
NAMED = {f"{case.name}_{at}": case for at, case in enumerate(CASES)}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels({name: case.body for name, case in NAMED.items()}, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", NAMED)
def test_numbers_equal_eager(kernels: Kernels, name: str):
    case: Case = NAMED[name]
    source = kernels.sources[name]
    assert case.run(kernels.launchers[source.name], source, "cpu") == [], source.text


def test_a_scan_is_computed_once_where_a_later_pass_needs_it_too():
    (nucleus,) = (case for case in scan_cases() if case.name == "nucleus")
    text = CppGenerator().generate(nucleus.body, "nucleus").text
    assert text.count("double scan") == 1, text
