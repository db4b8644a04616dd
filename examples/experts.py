"""A mixture of experts: each rank has two experts, and all-to-alls send tokens to them. Tokens above an expert's
capacity are dropped.

overlapc run --nproc 2 examples/experts.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from common import Arguments, losses_of, main
from torch import Tensor, nn
from torch.distributed import ProcessGroup, fsdp
from torch.distributed._functional_collectives import all_to_all_single_autograd

import overlapc

DIM, VOCABULARY, LENGTH = 32, 48, 16
EXPERTS = 2  # per rank
ROOM = 20  # capacity of an expert: tokens that it takes from each rank


class Experts(nn.Module):
    """Sends each token to the expert with the highest score; a token above the expert's capacity keeps its value."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.group, self.count = group, EXPERTS * group.size()
        self.router = nn.Linear(DIM, self.count, bias=False)
        self.up = nn.Parameter(torch.randn(EXPERTS, DIM, 2 * DIM) * DIM**-0.5)
        self.down = nn.Parameter(torch.randn(EXPERTS, 2 * DIM, DIM) * DIM**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        """`x` and the result are `[tokens, DIM]`."""
        score, expert = self.router(x).softmax(-1).max(-1)
        chosen = F.one_hot(expert, self.count)
        place = (chosen.cumsum(0) * chosen).sum(-1) - 1  # of each token among the tokens of its expert
        slot = torch.where(place < ROOM, expert * ROOM + place, self.count * ROOM)  # the last slot: dropped tokens
        sent = x.new_zeros(self.count * ROOM + 1, DIM).index_put((slot,), x)[:-1]
        taken = self.travel(sent).view(-1, EXPERTS, ROOM, DIM).transpose(0, 1).reshape(EXPERTS, -1, DIM)
        made = torch.bmm(F.gelu(torch.bmm(taken, self.up)), self.down)
        back = self.travel(made.view(EXPERTS, -1, ROOM, DIM).transpose(0, 1).reshape(-1, DIM))
        return x + F.pad(back, (0, 0, 0, 1))[slot] * score[:, None]

    def travel(self, x: Tensor) -> Tensor:
        """Send an equal part of the rows to each rank."""
        return all_to_all_single_autograd(x, None, None, self.group)


class Model(nn.Module):
    """Predicts the next tokens; `forward` returns the mean cross-entropy."""

    def __init__(self, group: ProcessGroup) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCABULARY, DIM), nn.Linear(DIM, VOCABULARY)
        self.norm, self.experts = nn.LayerNorm(DIM), Experts(group)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.experts(self.norm(self.embed(tokens.flatten())))), targets.flatten())


def train(args: Arguments) -> list[float]:
    """Train, and return the losses of this rank."""
    mesh = args.mesh(dp=-1)
    torch.manual_seed(0)  # sharded parameters must begin with the same values on all ranks
    with torch.device(args.device):
        model = Model(mesh.get_group())
    own = {model.experts.up, model.experts.down}
    with torch.no_grad():
        for param in own:
            param.mul_(1 + 0.1 * mesh.get_rank())
    shard = fsdp.fully_shard if args.eager else overlapc.fully_shard
    shard(model, mesh=mesh, ignored_params=own)
    groups = [{"params": [param for param in model.parameters() if (param in own) is mine]} for mine in (True, False)]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    step = args.compile(model, fullgraph=True)

    seeds = (100 * number + mesh.get_rank() for number in range(args.steps))
    return losses_of(step, optimizer, (args.tokens(VOCABULARY, LENGTH, seed) for seed in seeds))


if __name__ == "__main__":
    main(train, __doc__)
