"""A mixture of experts whose experts are distributed over ranks: tokens are exchanged by all-to-all."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.nn import functional as F


class MoE(nn.Module):
    """Embedding, one expert per rank, head; the router sends each token to the expert with the highest score.

    even: each rank sends the same number of slots to every expert, and drops tokens beyond that; otherwise it sends as
    many tokens as the router chose, so sizes depend on data.
    """

    def __init__(self, group: dist.ProcessGroup, even: bool, dim: int = 8, vocab: int = 24) -> None:
        super().__init__()
        self.group, self.even, self.count = group, even, group.size()
        self.embed = nn.Embedding(vocab, dim)
        self.router = nn.Linear(dim, self.count, bias=False)
        self.experts = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.embed(tokens).flatten(0, 1)
        share, expert = F.softmax(self.router(h), -1).max(-1)
        mixed = self._slots(h, expert) if self.even else self._sorted(h, expert)
        return F.cross_entropy(self.head(h + share[:, None] * mixed), targets.flatten())

    def _slots(self, h: Tensor, expert: Tensor) -> Tensor:
        chosen = F.one_hot(expert, self.count)
        slot = (chosen.cumsum(0) - 1)[torch.arange(h.shape[0], device=h.device), expert]
        slots = h.shape[0] // self.count
        place = F.one_hot(slot.clamp(max=slots), slots + 1)[:, :slots]
        dispatch = (chosen[:, :, None] * place[:, None, :]).to(h.dtype)  # token, expert, slot
        sent = torch.einsum("tes,td->esd", dispatch, h).flatten(0, 1)
        got = self.experts(all_to_all_single_autograd(sent, None, None, self.group))
        back = all_to_all_single_autograd(got, None, None, self.group)
        return torch.einsum("tes,esd->td", dispatch, back.view(self.count, slots, -1))

    def _sorted(self, h: Tensor, expert: Tensor) -> Tensor:
        order = expert.argsort(stable=True)
        counts = F.one_hot(expert, self.count).sum(0)
        coming = all_to_all_single(counts, None, None, self.group)
        sending, receiving = counts.tolist(), coming.tolist()
        got = all_to_all_single_autograd(h[order], receiving, sending, self.group)
        back = all_to_all_single_autograd(self.experts(got), sending, receiving, self.group)
        return torch.zeros_like(h).index_copy(0, order, back)
