"""Ranks whose graphs are not equal but have the same collectives train as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import overlapc
from overlapc.runtime.counters import counted
from tests.caches import cache_of_rank
from tests.ranks import values_on_ranks, whole_tensor

WIDTH = 8
SCALE = torch.linspace(1, 2, WIDTH)


def gathered(x: Tensor, dim: int) -> Tensor:
    return funcol.all_gather_tensor_autograd(x, dim, dist.group.WORLD)


def part_of_a_chunk(x: Tensor) -> Tensor:
    """Each rank computes with its part of the sequence. The gradient of a chunk is a cat in the order of ranks."""
    return gathered(x.chunk(dist.get_world_size(), 0)[dist.get_rank()].sin().contiguous(), 0)


def placed_among_the_others(x: Tensor) -> Tensor:
    """As the loss of OpenCLIP does: the own part has a gradient, those of other ranks have none."""
    parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.detach())
    parts[dist.get_rank()] = x
    return x @ torch.cat(parts).t()


def placed_in_global_rows(x: Tensor) -> Tensor:
    """Labels count rows of all ranks; with a symbolic size, rank 0 adds the number 0 and rank 1 the size."""
    labels = torch.arange(x.shape[0], device=x.device) + x.shape[0] * dist.get_rank()
    return F.cross_entropy(x @ gathered(x, 0).t(), labels)


def gathered_as_it_is_or_not(x: Tensor) -> Tensor:
    """One rank gathers a graph input, the other one a value that it has computed."""
    scale = SCALE.to(x.device)
    kept, sent = (scale, scale * 2) if dist.get_rank() else (scale * 2, scale)
    return x.repeat(1, 2) * funcol.all_gather_tensor(sent, 0, dist.group.WORLD) + kept.repeat(2)


def read_by_one_rank(x: Tensor) -> Tensor:
    """The second of two collectives is read by no rank, and the first one otherwise by one rank."""
    first = funcol.all_reduce(x.detach().sin(), "sum", dist.group.WORLD)
    funcol.all_reduce(first, "sum", dist.group.WORLD)
    return gathered(x + (first if dist.get_rank() else x.detach()), 0)


PROGRAMS = (
    part_of_a_chunk,
    placed_among_the_others,
    placed_in_global_rows,
    gathered_as_it_is_or_not,
    read_by_one_rank,
)


class Model(nn.Module):
    def __init__(self, program: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.program = program

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.program(x).square().mean()


def trained(program: Callable[[Tensor], Tensor], compiled: bool, device: str, options: dict[str, Any]) -> list[Tensor]:
    """Return the losses of two steps with batches of two sizes, and the parameters after them."""
    model = Model(program).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for part in (*model.layers, model):
        overlapc.fully_shard(part, mesh)
    torch._dynamo.reset()
    step = torch.compile(model, backend="overlapc", fullgraph=True, options=options) if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for rows in (4, 6):
        loss = step(torch.randn(rows, WIDTH, generator=generator).to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [value.cpu() for value in (*losses, *map(whole_tensor, model.parameters()))]


def differences(cache: str, device: str = "cpu") -> dict[str, tuple[float, int]]:
    """Return the largest difference from eager mode, and the number of graphs that are not the same on all ranks."""
    torch.set_num_threads(1)
    options = {"rank_timeout": 60.0, "native": device != "cpu", "cache_dir": cache_of_rank(cache)}
    found = {}
    for program in PROGRAMS:
        before = counted("graphs_unlike_those_of_other_ranks")
        pairs = zip(trained(program, True, device, options), trained(program, False, "cpu", options), strict=True)
        worst = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
        found[program.__name__] = worst, counted("graphs_unlike_those_of_other_ranks") - before
    return found


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, tuple[float, int]]]:
    return values_on_ranks(differences, 2, str(tmp_path_factory.mktemp("cache")), timeout_s=200)


@pytest.mark.parametrize("program", [program.__name__ for program in PROGRAMS])
def test_losses_and_parameters_are_eagers(outcomes: list[dict[str, tuple[float, int]]], program: str) -> None:
    for outcome in outcomes:
        worst, unequal = outcome[program]
        assert worst < 1e-6
        assert unequal > 0, "all ranks have the same graphs, so this program tests nothing"
