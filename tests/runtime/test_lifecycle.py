"""The lifecycle tracker is silent if memory lives as planned, and otherwise raises an error that names the buffer."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from overlapc.codegen.generators import generator_for
from overlapc.codegen.program import Free
from overlapc.codegen.python import PythonWrapper
from overlapc.config import Config
from overlapc.parallel import fully_shard
from overlapc.report import record
from overlapc.runtime import lifecycle
from overlapc.runtime.lifecycle import Lifecycle, LifecycleError
from tests.codegen.interpreted import triton_on_cpu
from tests.codegen.test_program import compiled, of
from tests.ranks import values_on_ranks
from tests.warm.test_warm import Block


def test_a_training_step_lives_as_planned_and_peaks_where_the_report_says(cache: Path):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 16)
    record.clear()
    lifecycle.last_peak_bytes.clear()
    step = torch.compile(model, backend="overlapc", options={"check_lifecycle": True, "cache_dir": str(cache)})
    for _ in range(2):
        step(x).backward()
    forward, backward = record.report_of_process().steps[0].graphs
    assert set(lifecycle.last_peak_bytes) == {forward.name, backward.name}
    inputs = sum(each.numel() for each in (*model.parameters(), x)) * 4
    assert lifecycle.last_peak_bytes[forward.name] + inputs == forward.peak_bytes


def test_a_buffer_that_is_never_freed_is_named():
    x = torch.randn(64)
    program, _, _ = compiled(lambda x: x.sin().sum() + x.sum(), x)
    freed = of(program, Free)[-1].variables[-1]
    tracked = PythonWrapper(program, tracked=True)
    kept = (line for line in tracked.source.splitlines() if f"'{freed}'" not in line or "life.freed" not in line)
    tracked.source = "\n".join(line for line in kept if not line.strip().startswith("del ") or freed not in line)
    call = tracked.function(generator_for("cpu").load(program.kernels(), Config.of({}).cache_dir))
    with pytest.raises(LifecycleError, match=f"test: {freed} was never freed"):
        call([x])


def test_memory_that_is_still_referenced_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lifecycle, "_RELEASE_TIMEOUT_S", 0.0)
    life = Lifecycle("g", [])
    held = torch.empty(10)
    life.allocated("buf", held, 40)
    with pytest.raises(LifecycleError, match="buf was freed by the plan, but something still holds"):
        life.freed(["buf"])


def test_a_tensor_that_gloo_releases_shortly_after_a_call_has_waited_is_no_error():
    life, held = Lifecycle("g", []), [torch.empty(10)]
    life.arrived("part", held[0])
    worker = threading.Timer(0.05, held.clear)  # like gloo's worker thread, which wakes the waiting thread first
    worker.start()
    life.freed(["part"])
    assert not held, "the tracker did not wait until the tensor was released"
    worker.join()


def test_fsdp_of_nested_modules_lives_as_planned():
    assert values_on_ranks(_nested_steps, 2) == [30, 30]


def _nested_steps() -> int:
    """Run 30 FSDP steps of three blocks (Linear, GELU, Linear); return the number of steps."""
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Sequential(*(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    step = torch.compile(model, backend="overlapc", options={"check_lifecycle": True})
    done = 0
    while done < 30:
        step(torch.randn(8, 32)).sum().backward()
        done += 1
    return done


def test_a_write_past_the_end_names_the_buffer_and_the_node():
    life = Lifecycle("g", [])
    a = life.allocate("a", (3,), (1,), torch.float32, "cpu", 12)
    life.ran("kernel", {"a": a.fill_(1)})
    assert life.peak_bytes == 12
    torch.as_strided(a, (4,), (1,)).fill_(1)
    with pytest.raises(LifecycleError, match="g: a was written 0 bytes past its end by kernel"):
        life.ran("kernel", {"a": a})


def test_fresh_and_freed_memory_is_nan():
    life = Lifecycle("g", [])
    a = life.allocate("a", (3,), (1,), torch.float32, "cpu", 12)
    assert a.isnan().all()
    seen = memoryview(a.zero_().numpy())
    life.freeing({"a": a})
    assert np.isnan(np.asarray(seen)).all()


def _in_flight() -> tuple[Lifecycle, dict[str, torch.Tensor]]:
    """Return a tracker with one collective in flight, from `given` to `result`."""
    life = Lifecycle("g", [])
    tensors = {name: life.allocate(name, (4,), (1,), torch.float32, "cpu", 16) for name in ("given", "result", "other")}
    life.started("gather", {"given": tensors["given"]}, {"result": tensors["result"]}, ["result"])
    return life, tensors


def test_buffers_of_a_collective_in_flight_may_not_be_written_or_freed():
    life, tensors = _in_flight()
    life.runs("reader", tensors | {"result": None}, ["other"])
    with pytest.raises(LifecycleError, match="result is used by reader before gather has arrived in it"):
        life.runs("reader", tensors, ["other"])
    with pytest.raises(LifecycleError, match="given is written by writer while gather still reads it"):
        life.runs("writer", {"given": tensors["given"]}, ["given"])
    with pytest.raises(LifecycleError, match="given is freed while gather, in flight, still uses it as given"):
        life.freeing({"given": tensors["given"]})
    with pytest.raises(LifecycleError, match="new takes over the memory of given while gather, in flight,"):
        life.took_over("new", "given", tensors["given"])


def test_after_the_wait_buffers_of_a_collective_may_be_written_and_freed():
    life, tensors = _in_flight()
    life.waited("result", tensors["result"])
    life.runs("writer", tensors, ["given", "result"])
    life.freeing(tensors)


def test_parts_of_a_pool_do_not_overlap():
    life, pool = Lifecycle("g", []), torch.empty(64, dtype=torch.uint8)
    life.allocated("pool", pool, 64)
    life.carved("a", pool[:32])
    with pytest.raises(LifecycleError, match="b is placed in pool memory that a still uses"):
        life.carved("b", pool[31:40])
    life.carved("c", pool[32:])
    life.carved("heir", pool[:16])
    with pytest.raises(LifecycleError, match="heir is placed in pool memory that a still uses"):
        life.runs("kernel", {}, [])
    life.freeing({"a": pool[:32]})
    life.freed(["a"])
    life.runs("kernel", {}, [])


def test_the_programs_of_a_pooled_step_pass(cache: Path):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 16)
    want = torch.autograd.grad(model(x), list(model.parameters()))
    options = {"check_lifecycle": True, "memory": "pool", "cache_dir": str(cache)}
    step = torch.compile(model, backend="overlapc", options=options)
    for _ in range(2):
        have = torch.autograd.grad(step(x), list(model.parameters()))
        torch.testing.assert_close(have, want)


def test_another_size_than_planned_is_named():
    with pytest.raises(LifecycleError, match="buf has 40 bytes, but 80 were planned"):
        Lifecycle("g", []).allocated("buf", torch.empty(10), 80)


def test_views_and_inputs_share_memory_without_being_counted_twice():
    x, life = torch.empty(10), None
    life = Lifecycle("g", [x])
    base = torch.empty(100)
    life.arrived("base", base)
    life.arrived("part", base[10:])
    life.arrived("given", x[1:])
    assert life.peak_bytes == 400
    life.freed(["base", "given"])  # `part` and the caller still hold the memory
    life.returned({"part": base})


def test_a_buffer_that_takes_over_memory_replaces_the_old_name():
    life = Lifecycle("g", [])
    a, other = torch.empty(10), torch.empty(10)
    life.allocated("a", a, 40)
    with pytest.raises(LifecycleError, match="b was to take over the memory of a"):
        Lifecycle("g", []).took_over("b", "a", a)
    life.took_over("b", "a", a.view(2, 5))
    with pytest.raises(LifecycleError, match="c was to take over"):
        life.took_over("c", "b", other)


def test_a_result_that_is_copied_into_the_traced_strides_lives_in_the_copy(cache: Path):
    def f(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        every_other = x.as_strided((4,), (2,), 0)
        return every_other, every_other.sin()

    x = torch.randn(16)
    options = {"check_lifecycle": True, "cache_dir": str(cache)}
    torch.testing.assert_close(torch.compile(f, backend="overlapc", options=options)(x), f(x))


def test_triton_kernels_that_are_interpreted_live_as_planned(cache: Path, fresh_dynamo: None):
    def sorted_signs(x: torch.Tensor) -> torch.Tensor:
        return (x > 0).sort()[0].cumsum(0)  # the comparison is freed after the call of `sort`

    x = torch.randn(20)
    with triton_on_cpu():
        step = torch.compile(
            sorted_signs, backend="overlapc", options={"check_lifecycle": True, "cache_dir": str(cache)}
        )
        assert torch.equal(step(x), sorted_signs(x))
