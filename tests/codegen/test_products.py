"""Generated kernels of matrix products: every kind in the interpreter, and compiled for sm_90."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.codegen.triton import TritonGenerator, products
from overlapc.codegen.triton.tiling import Tiling
from overlapc.fusion import fuse_ops
from overlapc.ir.body import Body, Load, Loop, Reduce, Store, op
from overlapc.ir.ops import loops_of
from overlapc.lowering import Target, lower
from tests.codegen.case import Case
from tests.codegen.cubins import compile_source
from tests.codegen.interpreted import interpreting
from tests.codegen.product_cases import bf16, plain, product_cases
from tests.codegen.terms import f32, p0, p1, r0

CASES = product_cases()


def small(body: Body) -> Tiling:
    """Return the smallest tiles that a product can have, so that every size needs several."""
    found = products.axes(body)
    assert found is not None
    y, x, grid = found
    return Tiling("dot", x, 16, 1, r=body.reduction, rblock=16, y=y, yblock=16, grid=grid, num_stages=2)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products_equal_eager(case: Case, tmp_path: Path):
    generator = TritonGenerator()
    assert generator.refuse(case.body) is None
    with interpreting():
        for tiling in (None, small(case.body)):
            source = generator.generate(case.body, case.name, tiling=tiling)
            launcher = generator.load([source], tmp_path)[source.name]
            assert not case.run(launcher, source, "cpu"), source.text


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_products_compile_for_sm_90(case: Case, tmp_path: Path):
    (compiled,) = compile_source(TritonGenerator().generate(case.body, case.name), tmp_path)
    assert compiled.asm["cubin"]


def test_large_tiles_use_tensor_cores_and_spill_nothing(tmp_path: Path):
    case = plain("large", 512, 1792, 1024, bf16, transposed=True)
    for tiling in products.candidates(case.body, {}):
        (compiled,) = compile_source(TritonGenerator().generate(case.body, case.name, tiling=tiling), tmp_path)
        assert "wgmma.mma_async" in compiled.asm["ptx"]
        assert "cp.async" in compiled.asm["ptx"]  # the next tiles are loaded asynchronously
        assert not re.search(r"st\.local", compiled.asm["ptx"]), tiling


def test_float32_products_have_the_precision_that_torch_is_set_to(request: pytest.FixtureRequest):
    case = plain("float32", 32, 32, 32, f32)
    assert '"ieee"' in TritonGenerator().generate(case.body, "float32").text
    request.addfinalizer(lambda: torch.set_float32_matmul_precision("highest"))
    torch.set_float32_matmul_precision("high")
    assert '"tf32"' in TritonGenerator().generate(case.body, "float32").text


def test_dots_that_are_not_matrix_products_are_refused():
    loops, inner = (Loop(p0, 8), Loop(p1, 8)), (Loop(r0, 8),)
    a, b = Load("a", 8 * p0 + r0, f32), Load("b", 8 * p0 + r0, f32)
    same_rows = Reduce("dot", op("mul", a, b), f32)
    assert "same loops" in str(TritonGenerator().refuse(Body(loops, inner, (Store("y", 8 * p0 + p1, same_rows, f32),))))
    product = Reduce("dot", op("mul", a, Load("b", 8 * p1 + r0, f32)), f32)
    twice = op("add", product, Reduce("sum", a, f32))
    assert "beside another" in str(TritonGenerator().refuse(Body(loops, inner, (Store("y", 8 * p0 + p1, twice, f32),))))


def test_a_factor_of_equal_elements_stays_a_tensor(tmp_path: Path):
    """Fused into the product it would be a scalar, from which no tile can be loaded."""

    def equal_elements(x: torch.Tensor) -> torch.Tensor:
        return torch.bmm(torch.full_like(x, 0.25) * 0.5, torch.full_like(x, 0.25).mT * 0.5)

    generator = TritonGenerator()
    traced = make_fx(lambda x: [equal_elements(x)], tracing_mode="fake")(torch.empty(1, 6, 6))
    lowered = lower(traced, "graph", target=Target(native_product=lambda product: True))
    ops, _ = fuse_ops(lowered, refuse=lambda device, body: generator.refuse_fused(body))
    assert any(loops.body.dots() for op_ in ops for loops in loops_of(op_))
    for op_ in ops:
        for loops in loops_of(op_):
            assert generator.generate(loops.body, op_.name).text
