"""Typical bodies equal eager torch in Triton's interpreter, in every form of kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from overlapc.codegen.triton import TritonGenerator
from tests.codegen.case import Case
from tests.codegen.interpreted import triton_on_cpu
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


def test_the_interpreter_joins_a_comparison_of_two_scalars_to_one_of_elements():
    def function(x: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        return (x <= bound) | bound.isnan()

    torch._dynamo.reset()
    x, bound = torch.tensor([-1.0, 0.5, 2.0]), torch.tensor(1.0)
    with triton_on_cpu():
        assert torch.equal(torch.compile(function, backend="overlapc")(x, bound), function(x, bound))
