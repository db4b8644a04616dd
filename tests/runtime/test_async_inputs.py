"""A compiled module after an eager tensor-parallel one: its input is a collective that nobody has waited for.

On real ranks, because torch's fake process group leaves what a reduce-scatter makes as it is before torch 2.13.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from overlapc.runtime.async_inputs import not_waited_for
from tests.ranks import values_on_ranks


def embedding() -> nn.Module:
    """Gives its rank's part of a sequence, by a reduce-scatter."""
    torch.manual_seed(0)
    plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    return parallelize_module(nn.Embedding(16, 8), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)


def blocks() -> dict[str, Any]:
    """What an eager and a compiled block make of the embedding on this rank."""
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


def test_the_gradient_goes_through_it(ranks: list[dict[str, Any]]):
    for seen in ranks:
        assert seen["late"] == [(True, (1,))] * 2
        eager, compiled = seen["grads"]
        torch.testing.assert_close(compiled, eager)
        assert eager.abs().sum() > 0


def test_without_gradients_it_is_waited_for_too(ranks: list[dict[str, Any]]):
    for seen in ranks:
        eager, compiled = seen["without"]
        torch.testing.assert_close(compiled, eager)
