"""One allocation serves what lives and dies within a graph; results are the same, and the peak is what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from overlapc.codegen.kernel import generator_for
from overlapc.codegen.pool import ALIGNMENT_BYTES, Arena, pooled
from overlapc.codegen.program import Allocate, Carve, Pool, Program
from overlapc.codegen.python import PythonWrapper
from overlapc.config import Config
from overlapc.errors import ConfigError
from overlapc.report import record
from overlapc.runtime import lifecycle
from tests.codegen.test_program import compiled, of
from tests.warm.test_warm import Block


def chain(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    a = x @ w
    b = a.sin() @ w
    c = b.cos() @ w
    return c.t() @ a, b.sum()


def run(program: Program, *inputs: Tensor) -> tuple[Tensor, ...]:
    launchers = generator_for("cpu").load(program.kernels(), Config.of({}).cache_dir)
    return PythonWrapper(program, tracked=True).bind(launchers)(list(inputs))


def test_temporaries_share_one_allocation_and_results_have_their_own():
    x, w = torch.randn(32, 32), torch.randn(32, 32)
    program, _, _ = compiled(chain, x, w)
    on_pool = pooled(program)
    (pool,) = of(on_pool, Pool)
    kept = {item.variable for item in of(on_pool, Allocate)}
    assert len(kept) < len(of(program, Allocate))
    outputs = run(on_pool, x, w)
    assert all(torch.equal(a, b) for a, b in zip(outputs, run(program, x, w), strict=True))
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 2
    assert all(output.untyped_storage().nbytes() < pool.bytes for output in outputs)


def test_buffers_that_are_alive_together_never_overlap():
    program, _, _ = compiled(chain, torch.randn(32, 32), torch.randn(32, 32))
    live: dict[str, tuple[int, int]] = {}
    for item in pooled(program).instructions:
        if isinstance(item, Carve):
            begin, end = item.offset, item.offset + int(item.layout.storage_bytes())
            others = [span for name, span in live.items() if span != (begin, end)]
            assert all(end <= low or high <= begin for low, high in others)
            live[item.variable] = (begin, end)
        for name in getattr(item, "variables", ()):
            if type(item).__name__ == "Free":
                live.pop(name, None)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 5)), max_size=40))
def test_an_arena_gives_disjoint_aligned_places_and_joins_holes(requests: list[tuple[int, int]]):
    arena, live = Arena(), []
    for size, drop in requests:
        offset = arena.take(size)
        assert offset % ALIGNMENT_BYTES == 0
        assert offset + size <= arena.bytes
        assert all(offset + size <= low or low + length <= offset for low, length in live)
        live.append((offset, size))
        for _ in range(min(drop, len(live))):
            arena.give_back(live.pop(drop % len(live))[0])
    for offset, _ in live:
        arena.give_back(offset)
    before = arena.bytes
    assert arena.take(max(before, 1)) == 0  # one hole again, or nothing there yet
    assert arena.bytes >= before


def test_a_training_step_on_a_pool_is_the_same_and_peaks_where_the_report_says(tmp_path: Path):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 16)
    results = []
    for memory in ("reuse", "pool"):
        torch._dynamo.reset()
        record.clear()
        model.zero_grad()
        options = {"memory": memory, "check_lifecycle": True, "cache_dir": str(tmp_path)}
        loss = torch.compile(model, backend="overlapc", options=options)(x)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        forward = record.report_of_process().steps[0].graphs[0]
        inputs = sum(each.numel() for each in (*model.parameters(), x)) * 4
        assert lifecycle.last_peak_bytes[forward.name] + inputs == forward.peak_bytes
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_what_no_pool_can_serve_is_said():
    with pytest.raises(ConfigError, match="wrapper='python'"):
        Config(memory="pool", wrapper="fx")
