"""Collectives by copies between GPU memories: ten steps compared with eager FSDP2, sums compared with float64, equal
bits under random delays, caching, and the memory budget. With fewer GPUs than ranks, ranks share GPUs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import overlapc
from tests.parallel.parity import FOUR, TWO, Case, check, seen_by
from tests.planning.test_keep_gathered_ranks import by_copies, check_copies
from tests.planning.test_last_batch_ranks import check_layouts
from tests.planning.test_last_batch_ranks import starts as last_batch_starts
from tests.ranks import on_gpus, take_gpu, values_on_ranks
from tests.test_copies_ranks import after_a_failure, check_failure, check_parity, check_sums, parity, sums
from tests.warm.test_warm_ranks import check_starts, starts

_c10d = torch.ops._c10d_functional


def named(cases: tuple[Case, ...], *names: str) -> tuple[Case, ...]:
    by_name = {case.name: case for case in cases}
    return tuple(by_name[name] for name in names)


# Ranks that share a GPU need gloo, over which eager tensor parallelism does not work (see `whole_tensor`), so
# test_parity_nccl.py compares tensor parallelism with one process.
CASES = {
    2: named(TWO, "reshard", "mixed precision", "accumulate", "uneven", "experts", "experts uneven"),
    4: named(FOUR, "to fewer ranks", "hsdp accumulate", "experts on groups of their own"),
}
pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_gpu(function: Any, *args: Any) -> Any:
    """Run `function` on this rank's GPU."""
    take_gpu()
    return function(*args)


def on_ranks(ranks: int, function: Any, *args: Any) -> list[Any]:
    return values_on_ranks(on_gpu, ranks, function, *args, timeout_s=170, **on_gpus(ranks))


@pytest.mark.parametrize("ranks", CASES)
def test_ten_steps_match_eager(ranks: int):
    cases = CASES[ranks]
    outcomes = on_ranks(ranks, seen, cases)
    for case in cases:
        check([on_rank[case.name] for on_rank in outcomes], case)


def seen(cases: Any) -> dict[str, dict[str, Any]]:
    """Run `compare` for every case, with copies."""
    return seen_by(cases, "cuda", transport="copy")


@pytest.mark.parametrize("ranks", [2, 4])
def test_steps_match_the_library_and_have_the_same_bits_with_random_delays(ranks: int):
    check_parity(on_ranks(ranks, parity, "bf16", "cuda", 200), 2e-2, in_trace=torch.cuda.device_count() >= ranks)


@pytest.mark.parametrize("ranks", [2, 4])
def test_sums_are_in_rank_order_and_as_exact_as_a_float32_reduce_scatter(ranks: int):
    check_sums(on_ranks(ranks, sums, "cuda"))


def gathered_beside_the_cpu() -> tuple[set[str], dict[str, str], bool]:
    """Gather in a graph that computes on a CPU tensor, too; return how the gather travelled, the reasons if not by
    copies, and whether the result is right."""
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name

    def gathered(x: Tensor, factors: Tensor) -> Tensor:
        return _c10d.wait_tensor(_c10d.all_gather_into_tensor(x * factors.prod(), ranks, group)) + 1

    x = torch.full((4096,), dist.get_rank() + 1.0, device="cuda")
    factors = torch.tensor([2.0, 3.0])
    compiled = torch.compile(gathered, backend="overlapc", options={"transport": "copy", "warm_start": False})
    right = torch.equal(compiled(x, factors), gathered(x, factors))
    graph = overlapc.report().steps[-1].graphs[-1]
    return {row.via for row in graph.collectives}, graph.not_copied, right


def test_a_tensor_on_the_cpu_keeps_no_collective_of_the_graph_from_copies():
    assert on_ranks(2, gathered_beside_the_cpu) == [({"copy"}, {}, True)] * 2


def test_after_an_exception_in_flight_the_next_step_fails_and_a_new_compilation_works():
    check_failure(on_ranks(2, after_a_failure, "cuda"))


def test_ranks_use_cached_graphs_and_steps_together(tmp_path: Path):
    check_starts(on_ranks(2, starts, str(tmp_path), "copy", "cuda"))


def test_a_rank_with_a_batch_of_another_size_uses_the_agreed_layout(tmp_path: Path):
    check_layouts(on_ranks(2, last_batch_starts, str(tmp_path), "copy", "cuda"))


def test_with_a_budget_ranks_keep_parameters_gathered_and_compute_the_same(tmp_path: Path):
    for on_rank in on_ranks(2, by_copies, str(tmp_path), "cuda"):
        check_copies(on_rank)
