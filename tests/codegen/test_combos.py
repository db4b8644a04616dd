"""Several kernels of one kind in one launch compute the same as separate ones, in both generators."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from overlapc.codegen.cpp import CppGenerator
from overlapc.codegen.generators import KernelSource
from overlapc.codegen.triton import TritonGenerator
from overlapc.codegen.triton.combo import combo_source
from overlapc.codegen.triton.tiling import Tiling
from overlapc.ir.body import Body, Load, Reduce, Store, op
from overlapc.ir.template import template_of
from tests.codegen.cubins import compile_source
from tests.codegen.interpreted import interpreting
from tests.codegen.terms import loop, p0, p1, r0

F32, BF16 = torch.float32, torch.bfloat16
Tensors = dict[str, torch.Tensor]
ELEMENTS = (100, 16, 1, 4096, 7, 2048)
LARGE = (100_000, 16, 70_000, 3)


def step(at: int, elements: int) -> Body:
    """Return an SGD step of a parameter, rounded to bfloat16, too; all parameters share the tensor of the rate."""
    moved = op("sub", Load(f"p{at}", p0, F32), op("mul", Load("rate", p0 * 0, F32), Load(f"g{at}", p0, BF16)))
    return Body((loop(p0, elements),), (), (Store(f"q{at}", p0, moved, F32), Store(f"h{at}", p0, moved, BF16)))


def norm(at: int, elements: int) -> Body:
    """Return the squared norm of a gradient."""
    value = Load(f"g{at}", r0, BF16)
    return Body((), (loop(r0, elements),), (Store(f"n{at}", r0 * 0, Reduce("sum", op("mul", value, value), F32), F32),))


def transposed(at: int) -> Body:
    return Body(
        (loop(p0, 24), loop(p1, 40)), (), (Store(f"q{at}", 40 * p0 + p1, Load(f"p{at}", 24 * p1 + p0, F32), F32),)
    )


def rows(at: int) -> Body:
    value = Load(f"p{at}", 40 * p0 + r0, F32)
    return Body((loop(p0, 24),), (loop(r0, 40),), (Store(f"n{at}", p0, Reduce("max", value, F32), F32),))


def tensors(sizes: tuple[int, ...]) -> Tensors:
    torch.manual_seed(0)
    found: Tensors = {"rate": torch.tensor([0.25])}
    for at, elements in enumerate(sizes):
        found[f"p{at}"], found[f"g{at}"] = torch.randn(elements), torch.randn(elements).to(BF16)
        found[f"q{at}"], found[f"h{at}"] = torch.zeros(elements), torch.zeros(elements, dtype=BF16)
        found[f"n{at}"] = torch.zeros(24)
    return found


def expected(name: str, sizes: tuple[int, ...]) -> Tensors:
    want = tensors(sizes)
    for at in range(len(sizes)):
        p, g = want[f"p{at}"], want[f"g{at}"]
        if name.startswith("step"):
            want[f"q{at}"] = p - 0.25 * g.float()
            want[f"h{at}"] = want[f"q{at}"].to(BF16)
        elif name.startswith("norm"):
            want[f"n{at}"][0] = g.float().pow(2).sum()
        elif name == "transposed":
            want[f"q{at}"] = p.view(40, 24).t().reshape(-1)
        else:
            want[f"n{at}"] = p.view(24, 40).amax(1)
    return want


CASES: dict[str, tuple[list[Body], tuple[int, ...]]] = {
    "step": ([step(at, elements) for at, elements in enumerate(ELEMENTS)], ELEMENTS),
    "step_large": ([step(at, elements) for at, elements in enumerate(LARGE)], LARGE),
    "norm": ([norm(at, elements) for at, elements in enumerate(ELEMENTS)], ELEMENTS),
    "norm_large": ([norm(at, elements) for at, elements in enumerate(LARGE)], LARGE),
    "transposed": ([transposed(at) for at in range(3)], (960,) * 3),
    "rows": ([rows(at) for at in range(3)], (960,) * 3),
}


def run(source: KernelSource, launcher, sizes: tuple[int, ...]) -> Tensors:
    given = tensors(sizes)
    launcher(*(given[buffer] for buffer in source.buffers))
    return given


@pytest.fixture(scope="module")
def cpp(tmp_path_factory: pytest.TempPathFactory):
    generator = CppGenerator()
    sources = {name: generator.combine(bodies, name) for name, (bodies, _) in CASES.items()}
    return sources, generator.load(list(sources.values()), tmp_path_factory.mktemp("kernels"))


@pytest.mark.parametrize("name", CASES)
def test_cpp_kernels_in_one_launch_give_the_expected_numbers(cpp, name: str) -> None:
    sources, launchers = cpp
    sizes = CASES[name][1]
    found = run(sources[name], launchers[sources[name].name], sizes)
    torch.testing.assert_close(found, expected(name, sizes), rtol=3e-6, atol=3e-6)


def test_small_parts_run_in_parallel_and_large_parts_run_on_all_threads(cpp) -> None:
    sources, _ = cpp
    assert "schedule(dynamic)" not in sources["step"].text
    assert sources["step_large"].text.count(", threads);") == 2
    many = CppGenerator().combine([step(at, 4000) for at in range(20)], "many")
    assert "schedule(dynamic)" in many.text


@pytest.mark.parametrize("name", [name for name in CASES if "large" not in name])
def test_triton_kernels_in_one_launch_give_the_expected_numbers(interpreter: None, name: str, tmp_path: Path) -> None:
    bodies, sizes = CASES[name]
    kind = template_of(bodies[0]).body
    forms: list[Tiling | None] = [None]
    if kind.reduction:
        forms.append(Tiling("looped", kind.loops, 2, 1, r=kind.reduction, rblock=64))
        forms.append(Tiling("split", kind.loops, 2, 1, r=kind.reduction, rblock=32, splits=4))
    sources = [combo_source(bodies, name, tiling=tiling) for tiling in forms]
    launchers = TritonGenerator().load(sources, tmp_path)
    for source in sources:
        found = run(source, launchers[source.name], sizes)
        torch.testing.assert_close(found, expected(name, sizes), rtol=3e-6, atol=3e-6)


def test_a_launch_of_many_parts_compiles_for_sm_90_and_loads_whole_vectors(tmp_path: Path) -> None:
    source = TritonGenerator().combine([step(at, 4096 * (1 + at)) for at in range(40)], "step")
    (compiled,) = compile_source(source, tmp_path)
    ptx = compiled.asm["ptx"]
    assert "ld.global.v4.b32" in ptx
    # Every part is selected by a branch: without branches the pointers of all parts would be in registers.
    assert len(re.findall(r"@%p\d+ bra", ptx)) >= 39


def test_launches_of_equal_kernels_have_equal_source() -> None:
    for generator in (CppGenerator(), TritonGenerator()):
        one, two = (generator.combine([step(first + at, 64) for at in range(3)], "step") for first in (0, 10))
        assert one.text == two.text
        assert one.name == two.name
        assert one.buffers != two.buffers


@pytest.mark.parametrize("name", ["step", "norm_large", "transposed", "rows"])
def test_tilings_to_measure_give_the_expected_numbers(name: str, tmp_path: Path) -> None:
    generator = TritonGenerator()
    bodies, sizes = CASES[name]
    first, *others = generator.alternatives(bodies, name)
    assert first.source == generator.combine(bodies, name)
    assert others
    assert all(each.source.buffers == first.source.buffers for each in others)
    with interpreting():
        launchers = generator.load([each.source for each in others[:4]], tmp_path)
        for each in others[:4]:
            found = run(each.source, launchers[each.source.name], sizes)
            torch.testing.assert_close(found, expected(name, sizes), rtol=3e-6, atol=3e-6)
