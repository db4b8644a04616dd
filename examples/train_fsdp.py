"""Train a small Llama with FSDP through overlapc, on any number of ranks.

overlapc run --nproc 2 examples/train_fsdp.py
overlapc run --nproc 8 -o memory_budget=70GiB examples/train_fsdp.py --device cuda
"""

from __future__ import annotations

import torch
from common import Arguments, losses_of, main
from torch.distributed import fsdp

import overlapc
from overlapc.launch import corpus
from overlapc.launch.llama import Llama, LlamaConfig


def train(args: Arguments) -> list[float]:
    """Train, and return the losses of this rank."""
    mesh = args.mesh(dp=-1)
    with torch.device(args.device):
        model = Llama(LlamaConfig(layers=4))
    model.reset_parameters(seed=0)
    shard = fsdp.fully_shard if args.eager else overlapc.fully_shard
    for layer in model.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = args.compile(model, fullgraph=True)

    batches = corpus.batches(args.steps, batch=2, seq=128, part=mesh.get_rank(), parts=mesh.size())
    return losses_of(
        step, optimizer, ((tokens.to(args.device), targets.to(args.device)) for tokens, targets in batches)
    )


if __name__ == "__main__":
    main(train, __doc__)
