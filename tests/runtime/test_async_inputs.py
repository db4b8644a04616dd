"""A compiled module after an eager tensor-parallel one: its input is, or contains, the result of a collective that is
still in flight.

On real ranks, because before torch 2.13 the fake process group does not fill the result of a reduce-scatter.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from overlapc.runtime.async_inputs import not_waited_for, wait_within
from tests.ranks import values_on_ranks


def embedding() -> nn.Module:
    """Return an embedding that returns this rank's part of a sequence, by a reduce-scatter."""
    torch.manual_seed(0)
    plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    return parallelize_module(nn.Embedding(16, 8), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)


def blocks() -> dict[str, Any]:
    """Run an eager and a compiled block on the embedding, with and without gradients; return what this rank saw."""
    torch.manual_seed(1)
    tokens, linear = torch.arange(8)[None], nn.Linear(8, 8)
    seen: dict[str, Any] = {"late": [], "grads": [], "without": []}
    for block in (linear, torch.compile(linear, backend="overlapc")):
        embed = embedding()
        x = embed(tokens)
        seen["late"].append((isinstance(x, AsyncCollectiveTensor), not_waited_for((tokens, x))))
        block(x).square().sum().backward()
        seen["grads"].append(embed.weight.grad.to_local())
        with torch.no_grad():
            seen["without"].append(block(embed(tokens)) + 0)
    return seen


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return values_on_ranks(blocks, 2)


def test_gradients_flow_through_an_async_input(ranks: list[dict[str, Any]]):
    for seen in ranks:
        assert seen["late"] == [(True, (1,))] * 2
        eager, compiled = seen["grads"]
        torch.testing.assert_close(compiled, eager)
        assert eager.abs().sum() > 0


def test_without_gradients_an_async_input_is_waited_for(ranks: list[dict[str, Any]]):
    for seen in ranks:
        eager, compiled = seen["without"]
        torch.testing.assert_close(compiled, eager)


class Block(nn.Module):
    """A sequence-parallel block like torchtitan's: its input and its result are DTensors."""

    def __init__(self, width: int, checkpointed: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.branch, x, use_reentrant=False) if self.checkpointed else self.branch(x)

    def branch(self, x: Tensor) -> Tensor:
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    def __init__(self, width: int = 16, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, width)
        self.blocks = nn.ModuleList(Block(width, checkpointed) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallel_model(checkpointed: bool) -> Model:
    torch.manual_seed(0)
    model, mesh = Model(checkpointed=checkpointed), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    held = {"use_local_output": False}
    plan: dict[str, Any] = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), **held),
        "norm": SequenceParallel(**held),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    of_block: dict[str, Any] = {
        "norm": SequenceParallel(**held),
        "inner": PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate(), **held),
        "inner.0": ColwiseParallel(**held),
        "inner.2": RowwiseParallel(output_layouts=Shard(1), **held),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        parallelize_module(block, mesh, of_block)
    return model


def trained(rank: int, backend: str, checkpointed: bool) -> dict[str, Any]:
    """Return losses and gradients of three steps, and the types of the local tensors in the first block's input."""
    torch._dynamo.reset()
    model = parallel_model(checkpointed)
    held = []
    model.blocks[0].register_forward_pre_hook(lambda _, given: held.append(type(given[0]._local_tensor)))
    for block in model.blocks if backend else ():
        block.compile(backend=backend, fullgraph=True)
    numbers = []
    for step in range(3):
        tokens = (torch.arange(32).view(2, 16) * (step + 5)) % 24
        dist.barrier()
        if rank == 1 and step:
            time.sleep(0.1)  # so that the collective has not ended when rank 0's first block begins
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        gradients = [parameter.grad.to_local() + 0 for parameter in model.parameters()]
        numbers.append((loss.detach(), gradients))
        model.zero_grad()
    return {"numbers": numbers, "held": held}


def block_by_block() -> dict[bool, list[dict[str, Any]]]:
    rank = dist.get_rank()
    return {ac: [trained(rank, backend, ac) for backend in ("", "overlapc")] for ac in (False, True)}


@pytest.fixture(scope="module")
def by_block() -> list[dict[bool, list[dict[str, Any]]]]:
    return values_on_ranks(block_by_block, 2)


@pytest.mark.parametrize("checkpointed", [False, True], ids=["", "checkpointed"])
def test_blocks_wait_for_collectives_inside_dtensors(
    by_block: list[dict[bool, list[dict[str, Any]]]], checkpointed: bool
):
    for rank in by_block:
        eager, compiled = rank[checkpointed]
        assert AsyncCollectiveTensor in eager["held"]
        torch.testing.assert_close(compiled["numbers"], eager["numbers"])


def test_a_collective_is_found_at_any_depth():
    late = AsyncCollectiveTensor(torch.full((3,), 2.0))
    outer = TwoTensor(TwoTensor(torch.ones(3), late), TwoTensor(torch.ones(3), torch.ones(3)))
    wait_within(outer)
    assert type(outer.a.b) is Tensor
    assert torch.equal(outer.a.b, late.elem)
