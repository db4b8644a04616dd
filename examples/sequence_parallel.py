"""Sequence parallelism for long sequences: each rank has a part of the sequence; for attention, all-to-alls exchange it
for a part of the heads.

This works with any attention (DeepSpeed calls it Ulysses). The parameters are sharded over the same ranks.

overlapc run --nproc 2 examples/sequence_parallel.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import Arguments, losses_of, main
from torch import Tensor, nn
from torch.distributed import ProcessGroup, fsdp
from torch.distributed._functional_collectives import all_to_all_single_autograd

import overlapc

DIM, HEADS, VOCABULARY, LENGTH = 32, 4, 48, 32  # LENGTH is that of the whole sequence


def exchange(x: Tensor, group: ProcessGroup) -> Tensor:
    """Exchange the parts of `x` `[ranks, ...]`: send `x[r]` to rank r, and receive `result[r]` from rank r."""
    return all_to_all_single_autograd(x.flatten(), None, None, group).view(x.shape)


class Attention(nn.Module):
    """Causal attention over sequences that are divided among the ranks of `group`."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group, self.ranks = group, group.size()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result are `[batch, part of the sequence, DIM]`."""
        batch, part, _ = x.shape
        heads, size = HEADS // self.ranks, DIM // HEADS
        # [ranks by heads, 3, batch, heads, part, size] -> the same, ranks by sequence
        qkv = self.qkv(x).view(batch, part, 3, self.ranks, heads, size).permute(3, 2, 0, 4, 1, 5)
        qkv = exchange(qkv.contiguous(), self.group).permute(1, 2, 3, 0, 4, 5).reshape(3, batch, heads, -1, size)
        mixed = F.scaled_dot_product_attention(*qkv.unbind(), is_causal=True)
        # [ranks by sequence, batch, part, heads, size] -> the same, ranks by heads
        mixed = mixed.view(batch, heads, self.ranks, part, size).permute(2, 0, 3, 1, 4)
        mixed = exchange(mixed.contiguous(), self.group).permute(1, 2, 0, 3, 4)
        return self.out(mixed.reshape(batch, part, DIM))


class Model(nn.Module):
    """Two layers over tokens; `forward` returns the mean cross-entropy of this rank's part."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(DIM), Attention(group)) for _ in range(2))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def train(args: Arguments) -> list[float]:
    """Train, and return the losses of this rank's part of each sequence."""
    mesh = args.mesh(cp=-1)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Model(mesh.get_group())
    shard = fsdp.fully_shard if args.eager else overlapc.fully_shard
    for layer in model.layers:
        shard(layer, mesh=mesh)
    shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = args.compile(model, fullgraph=True)

    whole = (args.tokens(VOCABULARY, LENGTH, seed=number) for number in range(args.steps))
    parts = ([each.chunk(mesh.size(), dim=1)[mesh.get_rank()] for each in batch] for batch in whole)
    return losses_of(step, optimizer, ((tokens, targets) for tokens, targets in parts))


if __name__ == "__main__":
    main(train, __doc__)
