"""Triton kernels compile in worker processes; the launching process then finds them. Needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget

from overlapc.codegen.triton import TritonGenerator
from overlapc.runtime import triton_workers
from overlapc.runtime.triton_compile import Specification, compile_now
from overlapc.runtime.triton_launch import _usual_variant, specification
from tests.multigpu.test_triton_gpu import swiglu_body

H200 = GPUTarget("cuda", 90, 32)


def specifications(cache: Path) -> list[Specification]:
    """Three kernels that differ in their size."""
    found = []
    for size in (1000, 2048, 4096 * 4096):
        source = TritonGenerator().generate(swiglu_body(size), "swiglu")
        stages = source.launch.stages
        found += [specification(source, stage, _usual_variant(source), H200, cache) for stage in stages]
    return found


@pytest.fixture
def compiled_here() -> Iterator[list[bool]]:
    """Of each kernel that this process asks Triton for: whether it had to be compiled."""
    seen: list[bool] = []

    def listen(*, cache_hit: bool, **rest: object) -> None:
        seen.append(not cache_hit)

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listen
        yield seen


def test_workers_compile_what_the_launcher_then_finds(tmp_path: Path, compiled_here: list[bool]):
    wanted = specifications(tmp_path)
    broken = Specification.parse(wanted[0].text().replace(f'"function": "{wanted[0].function}"', '"function": "gone"'))
    workers = triton_workers.Workers(2)
    try:
        assert workers.compile([*wanted, broken]) == [True, True, True, False]
    finally:
        workers.close()
    for each in wanted:
        assert "cubin" in compile_now(each).asm
    assert compiled_here == [False, False, False]


def test_a_worker_that_dies_leaves_its_kernels_to_the_launcher(tmp_path: Path):
    workers = triton_workers.Workers(1)
    for process in workers._processes:
        process.kill()
        process.wait()
    assert workers.compile(specifications(tmp_path)) == [False, False, False]
    workers.close()


def test_what_was_compiled_before_needs_no_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[int] = []

    class Counting:
        def compile(self, wanted: list[Specification]) -> list[bool]:
            asked.append(len(wanted))
            return [True, True, False]  # the last one fails

    monkeypatch.setattr(triton_workers._shared, "get", lambda: Counting())
    monkeypatch.setattr(triton_workers, "_count", lambda: 4)
    wanted = specifications(tmp_path)
    triton_workers.compile_ahead(wanted, tmp_path)
    triton_workers.compile_ahead(wanted, tmp_path)  # one is missing still: too few to start workers for
    assert asked == [3]
