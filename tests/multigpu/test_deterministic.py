"""Deterministic mode on a GPU: compilations with empty caches give the same schedule and the same bits at each step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from overlapc.report import record

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Model(nn.Module):
    """A model whose bits could vary by atomics, split reductions or measured choices: a lookup, norms, products, a
    loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 256)
        self.norm = nn.LayerNorm(256)
        self.up, self.down = nn.Linear(256, 1024), nn.Linear(1024, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1)
        logits = (x @ self.embed.weight.t()).flatten(0, 1)
        return F.cross_entropy(logits.float(), tokens.roll(-1, 1).flatten())


def trained(cache: Path, steps: int = 4) -> tuple[list[Tensor], list[str]]:
    """Compile with an empty cache and run a few steps; return (losses and last gradients, schedules)."""
    torch._dynamo.reset()
    record.clear()
    torch.manual_seed(0)
    model = Model().cuda().bfloat16()
    tokens = torch.randint(0, 100, (16, 512), device="cuda")
    step = torch.compile(model, backend="overlapc", options={"cache_dir": str(cache), "deterministic": True})
    losses = []
    for _ in range(steps):
        model.zero_grad()
        loss = step(tokens)
        loss.backward()
        losses.append(loss.detach())
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(parameter.grad, alpha=0.1)
    schedules = [graph.schedule.split("\n", 1)[1] for graph in record.report_of_process().steps[0].graphs]
    return [*losses, *(parameter.grad for parameter in model.parameters())], schedules


def test_two_compilations_give_one_schedule_and_equal_bits(tmp_path: Path):
    first, schedules = trained(tmp_path / "a")
    second, again = trained(tmp_path / "b")
    assert schedules == again
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[0], first[1]), "the losses of two steps must differ"
    assert not list(tmp_path.glob("*/profile-*.json")), "deterministic mode must not measure the machine"
