"""Ranks that compile different graphs or schedules fail with an error that names the difference, before a timeout.

On real processes, through the whole compiler.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

import overlapc
from tests.ranks import alive, run_on_ranks, values_on_ranks

TIMEOUT_S = 4.0  # only where a rank never comes: on a loaded machine other ranks may be this late, too


def different_models() -> None:
    """Compile with another activation on rank 1."""
    step(nn.ReLU() if dist.get_rank() == 0 else nn.Tanh())


def warnings_of(call: Callable[[], None]) -> list[str]:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        call()
    return [text for text in (str(warning.message) for warning in said) if "different graphs" in text]


def one_never_compiles() -> None:
    """Compile on rank 0 only, while rank 1 sleeps for longer than the timeout."""
    if dist.get_rank() == 0:
        step(nn.ReLU(), rank_timeout=TIMEOUT_S)
    else:
        time.sleep(TIMEOUT_S + 3)


def different_order() -> None:
    """Run a pass on rank 1 only that swaps two independent gathers, without verification."""
    step(nn.ReLU(), passes=[swapped] if dist.get_rank() else "none", verify=False)


def swapped(schedule, ctx):
    from overlapc.passes.base import PassReport

    first, second = schedule.starts()[:2]
    return schedule.move(second, before=first), PassReport("swapped")


def different_variables_and_batches() -> list[str]:
    """Return the warnings about a batch of 1, hence another graph, and another environment variable on rank 1."""
    if dist.get_rank() == 1:
        os.environ["TORCH_NOTED_BY_A_TEST"] = "2"
    rows = 1 if dist.get_rank() == 1 else 3
    return warnings_of(lambda: step(nn.Flatten(0) if rows == 1 else nn.ReLU(), rows=rows))


def reduced_if_positive(x: Tensor, same: bool) -> Tensor:
    """Communicate in the branches of a conditional only; unless `same`, continue in another way on rank 1."""
    sums = [lambda x, by=by: funcol.all_reduce(x * by, "sum", dist.group.WORLD).clone() for by in (2, 3)]
    y = torch.cond(x.sum() > 0, *sums, (x,))
    return y.relu() if same or dist.get_rank() == 0 else y.tanh()


def logging_on_one_rank(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Reduce a metric on both ranks, and read the result on rank 0 only."""
    y = x * weight
    total = funcol.all_reduce(y.detach().sum(), "sum", dist.group.WORLD)
    return y * 2, total if dist.get_rank() == 0 else x.sum()


def logged(training: bool, rank_check: bool) -> tuple[float, float]:
    """Return the logged metric, and the sum over ranks that a later collective computes."""
    options = {"rank_timeout": 60.0, "rank_check": rank_check, "warm_start": False}
    call = torch.compile(logging_on_one_rank, backend="overlapc", options=options)
    _, metric = call(torch.ones(4) * (dist.get_rank() + 1), torch.ones(4, requires_grad=training))
    later = torch.tensor(100.0)
    dist.all_reduce(later)
    return metric.item(), later.item()


def conditional_communication() -> None:
    call = torch.compile(reduced_if_positive, backend="overlapc", options={"rank_timeout": 60.0, "warm_start": False})
    x = torch.ones(8) * (dist.get_rank() + 1)
    torch.testing.assert_close(call(x, True), torch.full((8,), 6.0))
    torch._dynamo.reset()
    call(x, False)


def step(activation: nn.Module, rows: int = 3, **options: object) -> None:
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(nn.Linear(8, 8), activation, nn.Linear(8, 4))
    overlapc.fully_shard(model, mesh)
    compiled = torch.compile(model, backend="overlapc", fullgraph=True, options={"rank_timeout": 60.0, **options})
    compiled(torch.randn(rows, 8)).sum().backward()


def test_different_graphs_are_an_error_that_names_ranks_and_the_first_difference():
    outcomes = run_on_ranks(different_models, 2)
    for outcome in outcomes:
        assert outcome.error_type.endswith("RanksDisagree"), outcome
        assert "ranks compile different graphs" in outcome.error
        assert "aten.relu" in outcome.error
        assert "aten.tanh" in outcome.error
        assert "rank 0" in outcome.error
        assert "look for branches on the rank" in outcome.error
        assert "rank 1" in outcome.error


@pytest.mark.parametrize("training", [False, True])
def test_a_result_that_only_one_rank_reads_is_an_error_on_both_ranks(training: bool):
    for outcome in run_on_ranks(logged, 2, training, True):
        assert outcome.error_type.endswith("RanksDisagree"), outcome
        assert "ranks compile different graphs" in outcome.error


@pytest.mark.parametrize("training", [False, True])
def test_unless_ranks_compare_graphs_both_run_a_collective_whose_result_one_of_them_reads(training: bool):
    assert values_on_ranks(logged, 2, training, False) == [(12.0, 200.0), (8.0, 200.0)]


def test_graphs_that_communicate_in_the_branches_of_a_conditional_only_are_compared():
    for outcome in run_on_ranks(conditional_communication, 2):
        assert outcome.error_type.endswith("RanksDisagree"), outcome
        assert "aten.tanh" in outcome.error


def test_differing_variables_and_specialized_sizes_are_named():
    (forward, *_), _ = values_on_ranks(different_variables_and_batches, 2)
    assert "variable TORCH_NOTED_BY_A_TEST: not set on rank 0, 2 on rank 1" in forward
    assert "for which torch specializes the graph: not set on rank 0, [1, 8] on rank 1" in forward


def test_a_rank_that_never_compiles_is_named_after_the_timeout():
    outcomes = run_on_ranks(one_never_compiles, 2)
    assert outcomes[0].error_type.endswith("RanksDisagree"), outcomes[0]
    assert "rank 1" in outcomes[0].error
    assert outcomes[0].seconds < TIMEOUT_S + 60  # on a loaded machine, compiling up to the rank agreement takes long
    assert not any(alive(outcome.pid) for outcome in outcomes)


def test_another_order_of_collectives_is_an_error_before_anything_is_launched():
    outcomes = run_on_ranks(different_order, 2)
    for outcome in outcomes:
        assert outcome.error_type.endswith("RanksDisagree"), outcome
        assert "ranks would issue collectives in different orders" in outcome.error
        assert "give all ranks the same options" in outcome.error
        assert "   option passes: none on rank 0, swapped on rank 1" in outcome.error
        assert "option verify: not set on rank 0, False" not in outcome.error  # both ranks set it
