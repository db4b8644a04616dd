"""The lifecycle tracker: silent where memory lives as planned, and an error with the buffer's name where not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from overlapc.codegen.kernel import generator_for
from overlapc.codegen.program import Free
from overlapc.codegen.python import PythonWrapper
from overlapc.config import Config
from overlapc.report import record
from overlapc.runtime import lifecycle
from overlapc.runtime.lifecycle import Lifecycle, LifecycleError
from tests.codegen.test_program import compiled, of
from tests.warm.test_warm import Block


def test_a_training_step_lives_as_planned_and_peaks_where_the_report_says(tmp_path: Path):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 16)
    record.clear()
    lifecycle.last_peak_bytes.clear()
    step = torch.compile(model, backend="overlapc", options={"check_lifecycle": True, "cache_dir": str(tmp_path)})
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
    call = tracked.bind(generator_for("cpu").load(program.kernels(), Config.of({}).cache_dir))
    with pytest.raises(LifecycleError, match=f"test: {freed} was never freed"):
        call([x])


def test_memory_that_somebody_else_holds_is_named():
    life = Lifecycle("g", [])
    held = torch.empty(10)
    life.allocated("buf", held, 40)
    with pytest.raises(LifecycleError, match="buf was freed by the plan, but something still holds"):
        life.freed(["buf"])


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
    life.freed(["base", "given"])  # `part` and the caller still have them
    life.returned(["part"])


def test_a_takeover_moves_the_name():
    life = Lifecycle("g", [])
    a, other = torch.empty(10), torch.empty(10)
    life.allocated("a", a, 40)
    with pytest.raises(LifecycleError, match="b was to take over the memory of a"):
        Lifecycle("g", []).took_over("b", "a", a)
    life.took_over("b", "a", a.view(2, 5))
    with pytest.raises(LifecycleError, match="c was to take over"):
        life.took_over("c", "b", other)
