"""Pipeline parallelism: each stage is compiled by itself and sharded over its ranks; torch's 1F1B schedule runs them.

overlapc run --nproc 2 examples/pipeline.py     two stages
overlapc run --nproc 4 examples/pipeline.py     two stages of two ranks
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import Arguments, main
from torch import Tensor, nn
from torch.distributed import fsdp
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import overlapc

DIM, VOCABULARY, LENGTH, MICRO_BATCHES = 32, 48, 16, 4


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(DIM), nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def train(args: Arguments) -> list[float]:
    """Train, and return the losses on ranks of the last stage; other ranks return an empty list."""
    mesh = args.mesh(pp=2, dp=-1)
    number = mesh.get_local_rank("pp")
    torch.manual_seed(0)
    with torch.device(args.device):
        parts = nn.Embedding(VOCABULARY, DIM), block(), block(), nn.Linear(DIM, VOCABULARY)
    stage = nn.Sequential(*(parts[:2] if number == 0 else parts[2:]))
    if mesh["dp"].size() > 1:
        (fsdp.fully_shard if args.eager else overlapc.fully_shard)(stage, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    piped = PipelineStage(args.compile(stage), number, 2, torch.device(args.device), group=mesh["pp"].get_group())
    schedule = Schedule1F1B(piped, MICRO_BATCHES, loss_fn=loss_of)

    means = []
    for step in range(args.steps):
        tokens, targets = args.tokens(VOCABULARY, LENGTH, seed=100 * step + mesh.get_local_rank("dp"))
        losses: list[Tensor] = []
        if number == 0:
            schedule.step(tokens)
        else:
            schedule.step(target=targets, losses=losses)
            means.append(torch.stack(losses).mean().item())
        optimizer.step()
        optimizer.zero_grad()
    return means


if __name__ == "__main__":
    main(train, __doc__)
