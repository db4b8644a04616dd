"""Ranks whose batches differ compile one symbolic graph, once, and plan it alike."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as funcol

from overlapc.report import record
from overlapc.runtime.counters import counted
from tests.ranks import values_on_ranks


def layer(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Two reductions over the ranks that may be in flight beside products over the rows."""
    hidden = (x @ first).relu()
    total = funcol.all_reduce(hidden.sum(0), "sum", dist.group.WORLD)
    more = (hidden @ second).sin()
    mean = funcol.all_reduce(more.mean(0), "sum", dist.group.WORLD)
    return more * total + mean


def plans_of_a_rank() -> dict[str, Any]:
    """What this rank planned, and how often, over batches of its own sizes."""
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


def test_one_plan_for_batches_of_different_sizes():
    first, second = values_on_ranks(plans_of_a_rank, 2)
    for rank in (first, second):
        assert max(rank["errors"]) < 1e-4
        assert rank["graphs"] == [1, 1, 1], "one compilation serves all sizes"
    assert first["schedule"] == second["schedule"]
    assert first["step_ns"] == second["step_ns"]
