"""`memory="pool"`: one allocation has all temporaries of a graph; results are the same, and the peak is as reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from overlapc.codegen.arena import ALIGNMENT_BYTES, Arena, in_arena
from overlapc.codegen.generators import generator_for
from overlapc.codegen.program import Allocate, AllocateArena, Carve, Program
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
    return PythonWrapper(program, tracked=True).function(launchers)(list(inputs))


def test_temporaries_share_one_allocation_and_results_have_separate_ones():
    x, w = torch.randn(32, 32), torch.randn(32, 32)
    program, _, _ = compiled(chain, x, w)
    in_one = in_arena(program)
    (arena,) = of(in_one, AllocateArena)
    kept = {item.variable for item in of(in_one, Allocate)}
    assert len(kept) < len(of(program, Allocate))
    outputs = run(in_one, x, w)
    assert all(torch.equal(a, b) for a, b in zip(outputs, run(program, x, w), strict=True))
    assert len({output.untyped_storage().data_ptr() for output in outputs}) == 2
    assert all(output.untyped_storage().nbytes() < arena.bytes for output in outputs)


def test_buffers_that_are_live_at_the_same_time_do_not_overlap():
    program, _, _ = compiled(chain, torch.randn(32, 32), torch.randn(32, 32))
    live: dict[str, tuple[int, int]] = {}
    for item in in_arena(program).instructions:
        if isinstance(item, Carve):
            begin, end = item.offset, item.offset + int(item.layout.storage_bytes())
            others = [span for name, span in live.items() if span != (begin, end)]
            assert all(end <= low or high <= begin for low, high in others)
            live[item.variable] = (begin, end)
        for name in getattr(item, "variables", ()):
            if type(item).__name__ == "Free":
                live.pop(name, None)


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 4000), st.integers(0, 5)), max_size=40))
def test_an_arena_returns_disjoint_aligned_places_and_joins_holes(requests: list[tuple[int, int]]):
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
    assert arena.take(max(before, 1)) == 0  # all holes are joined, or the arena is still empty
    assert arena.bytes >= before


def test_a_training_step_with_an_arena_has_the_same_results_and_the_reported_peak(cache: Path):
    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 16)
    results = []
    for memory in ("reuse", "pool"):
        torch._dynamo.reset()
        record.clear()
        model.zero_grad()
        options = {"memory": memory, "check_lifecycle": True, "cache_dir": str(cache)}
        loss = torch.compile(model, backend="overlapc", options=options)(x)
        loss.backward()
        results.append([loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())])
        forward = record.report_of_process().steps[0].graphs[0]
        inputs = sum(each.numel() for each in (*model.parameters(), x)) * 4
        assert lifecycle.last_peak_bytes[forward.name] + inputs == forward.peak_bytes
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@torch.library.custom_op("overlapc_tests::first_of_memory", mutates_args=())
def first_of_memory(x: Tensor) -> Tensor:
    """Return the first two elements of the storage of `x`."""
    return torch.as_strided(x, (2,), (1,), 0).clone()


@first_of_memory.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_empty(2)


def scattered(x: Tensor, y: Tensor) -> Tensor:
    return torch.as_strided_scatter(x, x.flatten()[:2], (2,), (1,), 1) + torch.as_strided_scatter(
        y, x[0, :2], (2,), (1,)
    )


@pytest.mark.parametrize(
    "sees",
    [
        lambda x, y: torch.as_strided_copy(x, (2,), (1,), 1) + torch.as_strided_copy(y, (2,), (1,), 1),
        lambda x, y: scattered(x, y) @ scattered(y, x),
        lambda x, y: first_of_memory(x) + first_of_memory(y),
    ],
    ids=["as_strided_copy", "as_strided_scatter", "custom op"],
)
def test_a_call_that_reads_from_the_start_of_a_storage_finds_its_buffer_there(sees: Callable[..., Tensor]):
    def function(x: Tensor) -> Tensor:
        y = (x @ x).relu()
        z = (y @ y).sin()
        return sees(z @ z, y @ z)

    torch._dynamo.reset()
    x = torch.randn(16, 16) / 4
    result = torch.compile(function, backend="overlapc", options={"memory": "pool"})(x)
    torch.testing.assert_close(result, function(x), rtol=1e-5, atol=1e-5)


def test_gradients_of_take_and_as_strided_with_an_arena_equal_eager():
    def function(x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return x.take(torch.arange(4) * 5 % x.numel()).as_strided((2, 2), (2, 1), 0)

        return checkpoint(inner, x, use_reentrant=False).unsqueeze(1).expand(-1, 2, -1)

    torch._dynamo.reset()
    x, gradient = torch.randn(6, 1, requires_grad=True), torch.randn(2, 2, 2)
    in_one = torch.compile(function, backend="overlapc", options={"memory": "pool"})
    assert torch.equal(*(torch.autograd.grad(call(x), x, gradient)[0] for call in (in_one, function)))


def test_an_arena_with_the_fx_wrapper_is_an_error():
    with pytest.raises(ConfigError, match="wrapper='python'"):
        Config(memory="pool", wrapper="fx")
