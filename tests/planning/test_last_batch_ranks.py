"""A batch of another size on one rank: this rank compiles again by itself, and the others never notice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh

import overlapc
from overlapc.estimators.agreement.rank_agreement import peers_of
from overlapc.runtime.counters import counted
from tests.ranks import values_on_ranks

# Rows by rank, step by step: one rank alone, the other alone, and a batch of 1, which torch traces by itself.
ROWS = [(8, 8), (8, 5), (3, 8), (8, 1)]


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16), nn.LayerNorm(16))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(block() for _ in range(2)))


def batches() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(rows, 16, generator=generator) for rows in step] for step in ROWS]


def losses_of_one_process(steps: list[list[Tensor]] | None = None) -> list[float]:
    """Of the same steps: the mean over ranks of the losses of their batches."""
    plain = model()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    found = []
    for step in batches() if steps is None else steps:
        loss = sum(plain(x).square().mean() for x in step) / len(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def starts(cache: str, transport: str = "auto") -> list[dict[str, Any]]:
    """Training in a process that starts cold, and the first two steps of one that finds all of its graphs on disk."""
    cold = train(cache, len(ROWS), transport=transport)
    torch._dynamo.reset()
    peers_of().agreed.clear()
    return [cold, train(cache, 2, transport=transport)]


def train(cache: str, steps: int, device: str = "cpu", **more: Any) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch._dynamo.utils.counters.clear()
    sharded = model().to(device)
    for each in sharded:
        overlapc.fully_shard(each)
    overlapc.fully_shard(sharded)
    options = {"rank_timeout": 20.0, "native": False, "warm_start": True, "cache_dir": f"{cache}/{dist.get_rank()}"}
    losses, alone = steps_of(sharded, batches()[:steps], {**options, **more})
    return {
        "losses": losses,
        "alone": alone,
        "compiled": counted("graph_compiles"),
        "copied": counted("collectives_by_copies"),
    }


def steps_of(sharded: nn.Module, batches: list[list[Tensor]], options: dict[str, Any]) -> tuple[list[float], list[int]]:
    """The mean loss of each step, and how many graphs this rank had compiled by itself after it."""
    step = torch.compile(sharded, backend="overlapc", options=options)
    parameters = list(sharded.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    losses, alone = [], []
    for batch in batches:
        loss = step(batch[dist.get_rank()].to(parameters[0].device)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean.item() / dist.get_world_size())
        alone.append(counted("graphs_in_an_agreed_order"))
    return losses, alone


def test_batches_of_other_sizes_on_one_rank_train_as_in_one_process(tmp_path: Path) -> None:
    ranks = values_on_ranks(starts, 2, str(tmp_path), timeout_s=240)
    expected = losses_of_one_process()
    for cold, warm in ranks:
        assert cold["losses"] == pytest.approx(expected, rel=1e-5)
        assert warm["losses"] == cold["losses"][:2]
        assert cold["alone"][0] == warm["alone"][0] == 0
        assert (cold["compiled"] > 0, warm["compiled"]) == (True, 0)
    first, second = (cold["alone"] for cold, _ in ranks)
    assert (first[1], second[1]) == (0, 2)  # forward and backward, on the rank whose batch is smaller
    assert (first[2], second[3]) == (2, 4)


def test_a_rank_with_a_batch_of_another_size_goes_by_the_layout_of_copies_that_ranks_agreed_on(tmp_path: Path) -> None:
    (first, first_warm), (second, second_warm) = values_on_ranks(starts, 2, str(tmp_path), "copy", timeout_s=240)
    assert first["losses"] == second["losses"] == pytest.approx(losses_of_one_process(), rel=1e-5)
    assert (first["alone"], second["alone"]) == ([0, 0, 2, 2], [0, 2, 2, 4])
    for cold, warm in ((first, first_warm), (second, second_warm)):
        assert warm["losses"] == cold["losses"][:2]
        assert (warm["compiled"], warm["alone"]) == (0, [0, 0])  # cached graphs of both batches are used as they are
        assert cold["copied"] > 0
        assert warm["copied"] > 0


# Rows of four ranks in two groups, of which each holds the whole model.
ROWS_OF_FOUR = [(8, 8, 8, 8), (8, 8, 8, 5), (8, 3, 8, 8)]


def batches_of_four() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[torch.randn(rows, 16, generator=generator) for rows in step] for step in ROWS_OF_FOUR]


def with_replicas() -> tuple[list[float], list[int]]:
    """Parameters lie sharded over two ranks, twice (HSDP)."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    sharded = overlapc.fully_shard(model(), mesh=mesh)
    return steps_of(sharded, batches_of_four(), {"rank_timeout": 20.0, "native": False})


def test_a_batch_of_another_size_on_one_rank_of_replicas() -> None:
    ranks = values_on_ranks(with_replicas, 4, timeout_s=240)
    expected = losses_of_one_process(batches_of_four())
    for losses, _ in ranks:
        assert losses == pytest.approx(expected, rel=1e-5)
    assert [alone for _, alone in ranks] == [[0, 0, 0], [0, 0, 2], [0, 0, 0], [0, 2, 2]]


def communicates_activations(x: Tensor) -> Tensor:
    return funcol.all_reduce(x.sin(), "sum", dist.group.WORLD).cos()


def other_sizes_of_collectives() -> str:
    options = {"rank_timeout": 2.0, "native": False}
    step = torch.compile(communicates_activations, backend="overlapc", options=options, dynamic=False)
    step(torch.ones(4))
    error = ""
    if dist.get_rank() == 0:
        with pytest.raises(overlapc.RanksDisagree) as caught:
            step(torch.ones(3))
        error = str(caught.value)
    dist.barrier()
    return error


def test_a_rank_that_needs_other_collectives_is_told_what_to_do() -> None:
    error, _ = values_on_ranks(other_sizes_of_collectives, 2)
    assert "rank 1 did not reach compilation 2 (inference), graph within 2 s" in error
    assert "dynamic=True" in error
    assert "drop_last" in error
