"""Typical bodies equal eager torch in Triton's interpreter, in every form of kernel."""

from __future__ import annotations

from pathlib import Path

import pytest

from overlapc.codegen.triton import TritonGenerator
from tests.codegen.case import Case
from tests.codegen.scan_cases import scan_cases
from tests.codegen.triton_cases import small
from tests.codegen.triton_forms import variants

CASES = small() + scan_cases()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_numbers_equal_eager_in_every_form(case: Case, interpreter: None, tmp_path: Path):
    generator = TritonGenerator()
    assert generator.refuse(case.body) is None
    sources = {form: generator.generate(case.body, case.name, tiling=tiling) for form, tiling in variants(case.body)}
    launchers = generator.load(list(sources.values()), tmp_path)
    wrong = {form: case.run(launchers[source.name], source, "cpu") for form, source in sources.items()}
    assert not any(wrong.values()), {
        form: (problems, sources[form].text) for form, problems in wrong.items() if problems
    }
