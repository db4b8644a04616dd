"""Bodies with scans in C++ equal eager torch."""

from __future__ import annotations

import pytest

from overlapc.codegen.cpp import CppGenerator
from overlapc.ir.body import Body, Load, Scan, Store
from tests.codegen.case import Case
from tests.codegen.cpp_kernels import Kernels
from tests.codegen.scan_cases import long_scans, scan_cases, scans, symbolic_scan
from tests.codegen.terms import boolean, f32, f64, i32, i64, loop, p0, r0

# Added: rows longer than a block, and enough rows for several threads.
CASES = [*scan_cases(), *(scans(70, 5000, dtype) for dtype in (f32, i64, boolean))]
CASES += [symbolic_scan(2, 100_000), *(long_scans(4500, dtype) for dtype in (f32, f64, i32))]
NAMED = {f"{case.name}_{at}": case for at, case in enumerate(CASES)}


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    return Kernels({name: case.body for name, case in NAMED.items()}, tmp_path_factory.mktemp("cache"))


@pytest.mark.parametrize("name", NAMED)
def test_numbers_equal_eager(kernels: Kernels, name: str):
    case: Case = NAMED[name]
    source = kernels.sources[name]
    assert case.run(kernels.launchers[source.name], source, "cpu") == [], source.text


def test_a_scan_that_a_later_pass_reads_is_computed_once():
    (nucleus,) = (case for case in scan_cases() if case.name == "nucleus")
    text = CppGenerator().generate(nucleus.body, "nucleus").text
    assert text.count("double scan") == 1, text


def test_the_input_of_a_scan_is_computed_by_a_vectorized_loop():
    (nucleus,) = (case for case in scan_cases() if case.name == "nucleus")
    lines = CppGenerator().generate(nucleus.body, "nucleus").text.splitlines()
    (call,) = (at for at, text in enumerate(lines) if "scan_sums(" in text)
    filled = next(at for at in reversed(range(call)) if "for (" in lines[at])
    assert "omp simd" in lines[filled - 1]


def test_short_rows_and_sums_of_integers_need_no_arrays():
    x = Load("x", 5000 * p0 + r0, i64)
    total = Body((loop(p0, 3),), (loop(r0, 5000),), (Store("y", 5000 * p0 + r0, Scan("sum", x, i64, r0), i64),))
    for body in (total, scans(5, 21, f32).body):
        assert "so_far" not in CppGenerator().generate(body, "scan").text
