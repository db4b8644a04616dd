"""Typical bodies equal eager torch in Triton's interpreter, in every form of kernel."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch
from torch.utils._sympy.functions import FloorDiv

from overlapc.codegen.triton import TritonGenerator
from overlapc.codegen.triton.shape import KernelShape
from overlapc.codegen.triton.tiling import choose
from overlapc.ir.body import Body, Load, Store
from overlapc.ir.indexing import ModularIndexing
from tests.codegen.case import Case
from tests.codegen.interpreted import triton_on_cpu
from tests.codegen.scan_cases import scan_cases
from tests.codegen.terms import i0, loop, p0, p1, r0, total
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


@pytest.mark.parametrize(
    "index",
    [
        151_936 * p0 + i0,
        i0 * (151_936 * p0) + p1,
        FloorDiv(151_936 * p0, 151_937),
        ModularIndexing(151_936 * p0, sympy.S.One, sympy.Integer(1000)),
    ],
)
def test_a_part_of_an_index_that_exceeds_32_bits_makes_the_index_64_bits_wide(index: sympy.Expr) -> None:
    loops = (loop(p0, 16_384), loop(p1, 2))
    loaded = ((i0, Load("t", p0, torch.int64)),) if i0 in index.free_symbols else ()
    picked = Load("x", index, torch.float32, indirect=loaded)
    body = Body(loops, (), (Store("y", 2 * p0 + p1, picked, torch.float32),))
    assert KernelShape(body, choose(body, {}), "k").index_dtype == "tl.int64"


def test_the_end_of_the_last_program_s_share_fits_its_index() -> None:
    whole = Store("y", sympy.S.Zero, total(Load("x", r0, torch.bfloat16)), torch.float32)
    body = Body((), (loop(r0, 2**31 - 2**21 + 8),), (whole,))  # its shares of whole tiles exceed 2**31 elements
    assert KernelShape(body, choose(body, {}), "k").index_dtype == "tl.int64"


def test_sums_may_exceed_32_bits_on_the_way_to_an_index_that_does_not() -> None:
    index = 200_000 * p0 - 200_000 * FloorDiv(p0, 2) - 100_000 * p0 + i0
    picked = Load("x", index, torch.float32, indirect=((i0, Load("t", p0, torch.int64)),))
    body = Body((loop(p0, 10_000),), (), (Store("y", p0, picked, torch.float32),))
    assert KernelShape(body, choose(body, {}), "k").index_dtype == "tl.int32"
