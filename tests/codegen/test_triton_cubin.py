"""Every kernel form and every operation compiled for sm_90, which Triton does without a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapc.codegen.triton import TritonGenerator
from overlapc.runtime.triton_launch import compile_source
from tests.codegen.scan_cases import scan_cases
from tests.codegen.triton_cases import Case, small, variants
from tests.codegen.triton_ops import all_cases

FORMS = [(case, form, tiling) for case in small() + scan_cases() for form, tiling in variants(case.body)]


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_operations_compile(case: Case, tmp_path: Path):
    for compiled in compile_source(TritonGenerator().generate(case.body, case.name), tmp_path):
        assert compiled.asm["cubin"]


@pytest.mark.parametrize(("case", "form", "tiling"), FORMS, ids=[f"{case.name}-{form}" for case, form, _ in FORMS])
def test_forms_compile(case: Case, form: str, tiling, tmp_path: Path):
    source = TritonGenerator().generate(case.body, case.name, tiling=tiling)
    compiled = compile_source(source, tmp_path)
    assert len(compiled) == len(source.launch.stages)
    assert all(stage.asm["cubin"] for stage in compiled)
