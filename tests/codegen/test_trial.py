"""Which kernels can be timed on invented data, and the memory that they run on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from overlapc.codegen.trial import memory_sets, refuse
from overlapc.fusion import fuse_ops
from overlapc.ir.ops import Loops, LoweredGraph, loops_of
from overlapc.lowering import lower
from tests.fusion.small_graphs import change, graph, view

CPU = torch.device("cpu")


def refusals(function, *inputs: Tensor) -> set[str | None]:
    """Return the reasons why kernels of `function` cannot be timed on invented data; None for those that can."""
    gm = make_fx(lambda *args: (function(*args),), tracing_mode="fake")(*inputs)
    lowered = lower(gm, "test")
    found = {refuse(part.body) for op in fuse_ops(lowered)[0] for part in loops_of(op)}
    assert found, "nothing was generated"
    return found


TABLE, PLACES, NUMBERS = torch.rand(5, 3), torch.tensor([4, 3, 4]), torch.rand(3)


@pytest.mark.parametrize(
    "function",
    [
        lambda table, places, numbers: table * 2,
        lambda table, places, numbers: table[places],
        lambda table, places, numbers: torch.nn.functional.embedding(places, table),
        lambda table, places, numbers: table.gather(0, places[None]),
        lambda table, places, numbers: table[torch.where(places > 9, places - 9, places)],
    ],
)
def test_kernels_whose_indices_are_in_bounds_if_inputs_are_zero_can_be_timed(function):
    assert refusals(function, TABLE, PLACES, NUMBERS) == {None}


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda table, places, numbers: table.gather(0, (places - 1)[None]), "might fail its check"),
        (lambda table, places, numbers: table.gather(0, (places * 0 + 7)[None]), "might fail its check"),
        (lambda table, places, numbers: table.gather(0, (numbers * 4).long()[None]), "might fail its check"),
        (
            lambda table, places, numbers: table.index_put((places,), table[:3], accumulate=True),
            "its stores, and so its time, depend on loaded values",
        ),
    ],
)
def test_kernels_that_may_fail_a_check_or_scatter_cannot_be_timed(function, reason: str):
    said = refusals(function, TABLE, PLACES, NUMBERS)
    assert any(each is not None and reason in each for each in said), said


def test_trial_memory_has_the_graphs_dtypes_sizes_and_aliases():
    op = change("k", "a", "a", "b")
    made: LoweredGraph = graph([op], ["a__k"], views=[view("w", 100, dtype=torch.int64)])
    assert isinstance(op, Loops)
    sets = memory_sets(["a", "b", "a__k", "w"], made, CPU, span_bytes=1)
    assert len(sets) == 1
    a, b, changed, w = sets[0]
    assert a.data_ptr() == changed.data_ptr() != b.data_ptr()
    assert (a.dtype, a.numel() >= 8, w.dtype, w.numel() >= 100) == (torch.float32, True, torch.int64, True)
    assert a.count_nonzero() > 0
    assert w.count_nonzero() == 0


def test_there_are_enough_sets_of_memory_to_fill_a_cache():
    made = graph([change("k", "a", "b")], ["a__k"])
    sets = memory_sets(["a", "b"], made, CPU, span_bytes=10_000)
    pointers = [tensor.data_ptr() for tensors in sets for tensor in tensors]
    assert len(sets) == -(-10_000 // (2 * 512))
    assert len(set(pointers)) == 2 * len(sets)
    assert len({pointer % 512 for pointer in pointers}) <= 2  # one alignment for each of the two allocations
    assert len(memory_sets(["a", "b"], made, CPU, span_bytes=10**9)) == 64
