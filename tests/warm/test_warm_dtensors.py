"""Steps that take DTensors are found on disk as a whole, and give the same results as when they were compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

import overlapc
from overlapc.runtime.counters import counted
from tests.worlds import fake_world


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., :8] + self.down(torch.nn.functional.silu(self.up(x)))).square().mean()


def block(**how: Any) -> nn.Module:
    torch.manual_seed(0)
    model = Block()
    model.up.bias.requires_grad_(False)
    overlapc.fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)), **how)
    return model


def start(model: nn.Module, cache: Path) -> tuple[list[Any], int]:
    """Compile as in a new process and run two steps; return (losses, values and metadata of gradients; steps found)."""
    torch._dynamo.reset()
    before = counted("steps_from_cache")
    options = {"cache_dir": str(cache), "warm_start": True, "profile": "cpu-gloo", "rank_check": False}
    compiled = torch.compile(model, backend="overlapc", options=options)
    torch.manual_seed(1)
    seen: list[Any] = []
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        loss = compiled(torch.randn(3, 8))
        loss.backward()
        seen.append(loss.item())
        for param in model.parameters():
            grad = param.grad
            if grad is None:
                seen.append(None)
                continue
            assert isinstance(grad, DTensor)
            seen += [grad._spec, grad.requires_grad, grad.to_local().tolist(), grad.to_local().stride()]
    return seen, counted("steps_from_cache") - before


def test_a_second_start_finds_the_step_and_its_gradients_are_the_same(cache: Path):
    with fake_world(4):
        model = block()
        cold, found = start(model, cache)
        assert not found
        assert cold.count(None) == 2  # the frozen parameter has no gradient
        warm, found = start(model, cache)
        assert found == 1
        assert warm == cold
        assert start(block(), cache)[1] == 1  # a new model, whose parameters have other keys


@pytest.mark.parametrize(
    "how",
    [
        {"reshard_after_forward": True},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)},
        {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)},
        {"shard_placement_fn": lambda param: torch.distributed.tensor.Shard(param.ndim - 1)},
    ],
    ids=["reshard", "param_dtype", "reduce_dtype", "placement"],
)
def test_a_model_sharded_otherwise_is_another_step(cache: Path, how: dict[str, Any]):
    with fake_world(4):
        start(block(), cache)
        assert start(block(**how), cache)[1] == 0


def test_another_rank_is_another_step(cache: Path):
    with fake_world(4):
        start(block(), cache)
    with fake_world(4, rank=1):
        assert start(block(), cache)[1] == 0


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = self.linear(x)
        return hidden, hidden.view(-1, 4), hidden.sum()


def test_results_that_are_views_of_one_another_stay_views_at_every_call():
    with fake_world(4):
        model = Views()
        overlapc.fully_shard(model, mesh=init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
        compiled = torch.compile(model, backend="overlapc", options={"rank_check": False})
        for _ in range(3):
            hidden, flat, total = compiled(torch.randn(3, 8))
            total.backward()
            assert flat.data_ptr() == hidden.data_ptr()
            assert torch.equal(flat, hidden.view(-1, 4))
