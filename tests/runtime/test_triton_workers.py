"""Triton kernels are compiled in worker processes and cached for the launching process. Needs no GPU."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton

from overlapc.codegen.generators import KernelSource
from overlapc.codegen.triton import TritonGenerator
from overlapc.errors import ToolchainError
from overlapc.runtime import triton_binary, triton_workers
from overlapc.runtime.triton_binary import CubinRequest, compile_ahead, compile_in_background, wanted
from overlapc.runtime.triton_kernel import Variant, usual_variant
from tests.multigpu.test_triton_gpu import swiglu_body
from tests.worlds import fake_world

H200 = ("cuda", 90, 32)
ELF = b"\x7fELF"


def source_of(size: int) -> KernelSource:
    return TritonGenerator().generate(swiglu_body(size), "swiglu")


def stages(source: KernelSource, cache: Path, variant: Variant | None = None) -> list[CubinRequest]:
    return [wanted(source, stage, variant or usual_variant(source), H200, cache) for stage in source.launch.stages]


def three(cache: Path) -> dict[str, CubinRequest]:
    """Return compile requests of three kernels that differ in size."""
    return {each.key: each for size in (1000, 2048, 4096 * 4096) for each in stages(source_of(size), cache)}


@pytest.fixture
def compiled_here() -> Iterator[list[bool]]:
    """Return a list that records, for each kernel that this process requests from Triton, whether it was compiled."""
    seen: list[bool] = []

    def listen(*, cache_hit: bool, **rest: object) -> None:
        seen.append(not cache_hit)

    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = listen
        yield seen


@pytest.fixture
def two_workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let this process use two workers, whatever the number of cores; none that an earlier test started runs on."""
    triton_workers._shared.close()
    monkeypatch.setattr(triton_workers, "_count", lambda: 2)
    yield
    triton_workers._shared.close()


def test_the_launcher_finds_what_workers_compiled(tmp_path: Path, compiled_here: list[bool], two_workers: None):
    kernels = three(tmp_path)
    compile_ahead(kernels, tmp_path)
    for each in kernels.values():
        binary, cubin = each.obtain(tmp_path)
        assert cubin.read_bytes().startswith(ELF)
        assert binary.entry.encode() in cubin.read_bytes()
        assert binary.warps == each.stage.num_warps
    assert compiled_here == []  # this process did not request kernels from Triton


def test_a_kernel_that_compiles_in_the_background_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, two_workers: None
):
    batches = []
    compile_all = triton_workers.compile_all

    def noted(specifications: list) -> list:
        batches.append(len(specifications))
        return compile_all(specifications)

    monkeypatch.setattr(triton_workers, "compile_all", noted)
    kernels = three(tmp_path)
    compile_in_background(lambda: kernels, tmp_path)
    compile_ahead(kernels, tmp_path)
    assert batches == [3]
    assert all(each.find(tmp_path) is not None for each in kernels.values())


def test_the_launcher_explains_errors_of_kernels_that_workers_refused(tmp_path: Path, two_workers: None):
    good = three(tmp_path)
    source = source_of(512)
    broken = dataclasses.replace(source, text=source.text.replace("tl.load(", "tl.lord("))
    bad = {each.key: each for each in stages(broken, tmp_path)}
    compile_ahead({**good, **bad}, tmp_path)
    assert all(each.find(tmp_path) for each in good.values())
    for each in bad.values():
        assert each.find(tmp_path) is None
        with pytest.raises(ToolchainError, match=rf"Triton refused .* of {broken.name}"):
            each.obtain(tmp_path)


def test_a_worker_that_dies_leaves_its_kernels_to_the_launcher(tmp_path: Path):
    workers = triton_workers.Workers(1)
    for process in workers._processes:
        process.kill()
        process.wait()
    assert workers.compile([each.what for each in three(tmp_path).values()]) == [None, None, None]
    workers.close()


def test_workers_that_died_are_replaced(tmp_path: Path, two_workers: None):
    triton_workers.start()
    for process in triton_workers._shared._workers._processes:
        process.kill()
        process.wait()
    assert None not in triton_workers.compile_all([each.specification(tmp_path) for each in three(tmp_path).values()])


def test_an_answer_to_another_request_is_not_used(tmp_path: Path):
    workers = triton_workers.Workers(1)
    (process,) = workers._processes
    first, *others = [each.specification(tmp_path) for each in three(tmp_path).values()]
    process.stdin.write(first.text() + "\n")
    assert workers.compile(others) == [None, None]
    assert process.wait(20)


def test_what_triton_prints_is_not_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NVPTX_ENABLE_DUMP", "1")
    workers = triton_workers.Workers(1)
    assert None not in workers.compile([each.specification(tmp_path) for each in three(tmp_path).values()])
    workers.close()


def test_an_interrupted_compilation_ends_its_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def interrupt(_: threading.Thread) -> None:
        raise KeyboardInterrupt

    workers = triton_workers.Workers(1)
    monkeypatch.setattr(threading.Thread, "join", interrupt)
    with pytest.raises(KeyboardInterrupt):
        workers.compile([each.specification(tmp_path) for each in three(tmp_path).values()])
    assert all(process.poll() is not None for process in workers._processes)


def test_workers_end_while_a_forked_child_lives():
    """A data loader's processes are such children, and have copies of all pipes."""
    workers = triton_workers.Workers(1)
    child = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    child.start()
    closing = threading.Thread(target=workers.close, daemon=True)
    closing.start()
    closing.join(20)
    still_closing = closing.is_alive()
    child.kill()
    assert not still_closing
    assert all(process.poll() is not None for process in workers._processes)


def test_a_forked_child_has_no_workers(two_workers: None):
    triton_workers.start()
    child = os.fork()
    if not child:
        os._exit(triton_workers._shared.running)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert triton_workers._shared.running


def test_cached_kernels_need_no_workers(tmp_path: Path, two_workers: None):
    kernels = three(tmp_path)
    for each in kernels.values():
        each.obtain(tmp_path)
    compile_ahead(kernels, tmp_path)
    assert not triton_workers._shared.running
    assert not triton_workers.worth_it(2)  # starting workers would take longer than compiling
    assert triton_workers.worth_it(3)


def test_a_damaged_entry_is_compiled_again(tmp_path: Path):
    (each,) = stages(source_of(1000), tmp_path)
    binary, cubin = each.obtain(tmp_path)
    whole = cubin.read_bytes()
    for damage in (lambda: cubin.write_bytes(whole[:100]), lambda: cubin.with_suffix(".json").write_text("{")):
        damage()
        triton_binary._entries.cache_clear()  # simulates a new process, as a process checks an entry only once
        assert each.find(tmp_path) is None
        assert each.obtain(tmp_path) == (binary, cubin)
        assert cubin.read_bytes() == whole


def test_a_key_covers_everything_that_the_code_depends_on(tmp_path: Path):
    source = source_of(1000)
    (usual,) = stages(source, tmp_path)
    assert stages(source, tmp_path / "elsewhere")[0].key == usual.key
    (unaligned,) = stages(source, tmp_path, Variant(aligned=0b110, divisible=0, wide=False))
    (edited,) = stages(dataclasses.replace(source, text=source.text + "# more\n"), tmp_path)
    warps = dataclasses.replace(usual.stage, num_warps=2 * usual.stage.num_warps)
    others = [wanted(source, warps, usual_variant(source), H200, tmp_path)]
    others.append(wanted(source, usual.stage, usual_variant(source), ("cuda", 100, 32), tmp_path))
    assert len({usual.key, unaligned.key, edited.key, *(each.key for each in others)}) == 5


@pytest.mark.parametrize(
    ("told", "ranks", "gpus", "expected"),
    [("", 1, 8, 16), ("4", 64, 8, 8), ("", 64, 8, 4), ("", 2, 8, 16), ("", 8, 0, 16), ("64", 64, 8, 1)],
    ids=["one process", "torchrun", "srun on many hosts", "srun of two ranks", "no GPU", "more ranks than cores"],
)
def test_ranks_of_one_host_share_its_cores(told: str, ranks: int, gpus: int, expected: int, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", told)
    monkeypatch.setattr(triton_workers.os, "sched_getaffinity", lambda _: range(32))
    monkeypatch.setattr(triton_workers.torch.cuda, "device_count", lambda: gpus)
    with fake_world(ranks):
        assert triton_workers._count() == expected
