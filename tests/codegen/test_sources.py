"""Kernels that differ only in their buffers are generated once, and compiled while passes run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch

from overlapc.codegen import generators
from overlapc.codegen.cpp import CppGenerator
from overlapc.codegen.generators import KernelSource
from overlapc.codegen.sources import Sources, generate_kernels, with_scratch
from overlapc.fusion.to_schedule import to_schedule
from overlapc.ir.body import Body, Reduce
from overlapc.ir.ops import Layout, Loops, View
from tests.fusion.small_graphs import graph, pointwise
from tests.ir.bodies import loops_of, put, x


def test_equal_kernels_of_layers_are_generated_once(monkeypatch: pytest.MonkeyPatch):
    generated = []
    generate = CppGenerator.generate

    def noted(self: CppGenerator, body: Any, *how: Any) -> Any:
        generated.append(body)
        return generate(self, body, *how)

    monkeypatch.setattr(CppGenerator, "generate", noted)
    chain = [("y1", "a"), ("y2", "y1"), ("y3", "y2")]
    made = graph([pointwise(name, read) for name, read in chain] + [pointwise("z", "a", elements=9)], ["y3", "z"])
    sources = generate_kernels(to_schedule(made.ops, made), Sources(made))
    assert len(generated) == 2
    assert len({sources[name].text for name, _ in chain}) == 1
    assert [sources[name].buffers for name, _ in chain] == [(name, read) for name, read in chain]
    assert sources["z"].text != sources["y1"].text


def test_a_reduction_that_is_split_among_programs_allocates_its_partial_results():
    gpu, loops = torch.device("cuda", 0), loops_of("r", (1 << 20,))
    total = Reduce("sum", x("a", loops[0].symbol), torch.float32)
    result = View("total", Layout(gpu, torch.float32, (), ()))
    split = Loops("total", gpu, Body((), loops, (put("total", sympy.S.Zero, total),)), (result,))
    made = graph([split], ["total"], ["a"])
    schedule = to_schedule([split], made)
    source = Sources(made).of(split)
    (node,) = with_scratch(schedule, Sources(made)).nodes
    assert node.scratch_bytes == source.launch.scratch_bytes > 0
    tuned = {source.name: replace(source, scratch_bytes=sympy.Integer(12))}
    assert with_scratch(schedule, Sources(made, tuned)).nodes[0].scratch_bytes == 12
    whole = graph([pointwise("y", "a")], ["y"])
    unsplit = to_schedule(whole.ops, whole)
    assert with_scratch(unsplit, Sources(whole)) is unsplit


class Ahead(CppGenerator):
    """A generator that can compile in the background."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, set[str]]] = []

    def compile_ahead(self, sources: Sequence[KernelSource], cache_dir: Path) -> None:
        self.calls.append(("compile ahead", {source.name for source in sources}))

    def load(self, sources: Sequence[KernelSource], cache_dir: Path) -> Any:
        self.calls.append(("load", {source.name for source in sources}))
        return super().load(sources, cache_dir)


@pytest.mark.parametrize("planned_only", [False, True])
def test_kernels_compile_while_passes_run(monkeypatch: pytest.MonkeyPatch, planned_only: bool, fresh_dynamo: None):
    ahead = Ahead()
    monkeypatch.setitem(generators._generators, "cpu", ahead)
    backend: Any = "overlapc"
    if planned_only:
        from overlapc.backend import plan_only as backend
    torch.compile(lambda x: x.exp().sum(0), backend=backend, options={"warm_start": False})(torch.randn(5, 7))
    names = [name for name, _ in ahead.calls]
    assert names == ([] if planned_only else ["compile ahead", "load"])
    assert not ahead.calls or ahead.calls[0][1] == ahead.calls[1][1]
