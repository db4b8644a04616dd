"""Deterministic mode: the same schedule and bits, with torch's deterministic switch on only while graphs run."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from overlapc.report import record
from overlapc.runtime.deterministic import deterministic, deterministically
from tests.caches import new_cache


class Lookup(nn.Module):
    """A model with an embedding, whose gradient uses atomics unless deterministic mode is on."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 16), nn.Linear(16, 16)

    def forward(self, tokens: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.out(self.embed(tokens))).square().mean()


def run(cache: Path, tokens: Tensor, **options: object) -> tuple[list[Tensor], list[str], list[str]]:
    """Compile with an empty cache and run; return (loss and gradients, schedules without and with their first line)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Lookup().to(tokens.device)
    record.clear()
    step = torch.compile(model, backend="overlapc", options={"cache_dir": str(new_cache(cache)), **options})
    loss = step(tokens)
    loss.backward()
    graphs = record.report_of_process().steps[0].graphs
    schedules = [graph.schedule.split("\n", 1)[1] for graph in graphs]
    return [loss.detach(), *(each.grad for each in model.parameters())], schedules, [g.schedule for g in graphs]


def test_two_compilations_give_one_schedule_and_equal_bits(tmp_path: Path):
    tokens = torch.randint(0, 10, (4, 64))
    first, schedules, _ = run(tmp_path / "a", tokens, deterministic=True)
    second, again, _ = run(tmp_path / "b", tokens, deterministic=True)
    assert schedules == again
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    # Nothing was measured: the cache folder has no profile of this machine.
    assert not list(tmp_path.glob("*/profile-*.json"))
    assert "embedding_dense_backward" in schedules[1]


def test_nothing_is_measured_to_compute_a_cache_key(tmp_path: Path):
    run(tmp_path / "a", torch.randint(0, 10, (4, 64)), deterministic=True, warm_start=True)
    assert not list(tmp_path.glob("*/profile-*.json"))


def test_the_switch_of_torch_has_the_same_effect(tmp_path: Path):
    tokens = torch.randint(0, 10, (4, 64))
    _, by_option, _ = run(tmp_path / "a", tokens, deterministic=True)
    with deterministic(True):
        _, by_switch, _ = run(tmp_path / "b", tokens)
    assert by_option == by_switch


def test_the_switch_is_on_while_graphs_run_and_restored_afterwards():
    seen = []
    call = deterministically(lambda args: seen.append(torch.are_deterministic_algorithms_enabled()), True)
    call([])
    assert seen == [True]
    assert not torch.are_deterministic_algorithms_enabled()
    plain = lambda args: None  # noqa: E731
    assert deterministically(plain, False) is plain
