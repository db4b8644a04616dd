"""Ranks with batches of different sizes compile one symbolic graph once, and ranks whose batches or shards differ in
size still plan the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

import overlapc
from overlapc.report import record
from overlapc.runtime.counters import counted
from tests.ranks import values_on_ranks


def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Two all-reduces that can overlap matrix products over the rows."""
    hidden = (x @ first).relu()
    total = funcol.all_reduce(hidden.sum(0), "sum", dist.group.WORLD)
    more = (hidden @ second).sin()
    mean = funcol.all_reduce(more.mean(0), "sum", dist.group.WORLD)
    return more * total + mean


class Lopsided(nn.Module):
    """A layer whose largest parameter has one row: with two ranks, all of it lies on the first."""

    def __init__(self) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.ones(1, 2048))
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh() * (x.mean() * self.row).mean()


def plans_of_a_rank() -> dict[str, Any]:
    """Return this rank's plans where batches differ between ranks, and where shards do."""
    return {"batches": plans_of_own_batches(), "shards": orders_of_own_shards()}


def orders_of_own_shards() -> list[list[str]]:
    """Return the order of collectives in forward and in backward where one rank holds most of the parameters."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model = nn.Sequential(*(Lopsided() for _ in range(5)))
    for each in model:
        overlapc.fully_shard(each, mesh)
    step = torch.compile(model, backend="overlapc", options={"native": False, "warm_start": False})
    step(torch.randn(8, 64)).sum().backward()
    return [[row.name for row in graph.collectives] for graph in record.report_of_process().steps[-1].graphs[-2:]]


def plans_of_own_batches() -> dict[str, Any]:
    """Run batches of sizes that differ between ranks; return errors, numbers of compiled graphs, and the plan."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(32, 32, generator=generator) for _ in range(2)]
    step = torch.compile(layer, backend="overlapc", options={"native": False, "warm_start": False})
    errors, graphs = [], []
    for rows in (8 + 100 * rank, 21 + rank, 300 - 200 * rank):
        x = torch.randn(rows, 32, generator=generator)
        torch._dynamo.mark_dynamic(x, 0)
        errors.append((step(x, *weights) - layer(x, *weights)).abs().max().item())
        graphs.append(counted("graphs"))
    (graph,) = record.report_of_process().steps[-1].graphs
    lines = graph.schedule.splitlines()
    return {"errors": errors, "graphs": graphs, "schedule": lines, "step_ns": graph.after.step_ns}


@pytest.fixture(scope="module")
def ranks() -> list[Any]:
    return values_on_ranks(plans_of_a_rank, 2)


def test_ranks_with_batches_of_different_sizes_have_one_plan(ranks):
    first, second = (rank["batches"] for rank in ranks)
    for rank in (first, second):
        assert max(rank["errors"]) < 1e-4
        assert rank["graphs"] == [1, 1, 1], "one compilation serves all sizes"
    assert first["schedule"] == second["schedule"]
    assert first["step_ns"] == second["step_ns"]


def test_ranks_whose_shards_differ_in_size_have_one_order(ranks):
    first, second = (rank["shards"] for rank in ranks)
    assert all(first)
    assert first == second
