"""A compiled module after an eager tensor-parallel one: its input is a collective that nobody has waited for."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from overlapc.runtime.async_inputs import not_waited_for
from tests.worlds import fake_world


@pytest.fixture(autouse=True)
def world():
    with fake_world(2):
        yield


def embedding() -> nn.Module:
    """Gives its rank's part of a sequence, by a reduce-scatter."""
    torch.manual_seed(0)
    plan = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    return parallelize_module(nn.Embedding(16, 8), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), plan)


def test_the_gradient_goes_through_it():
    tokens, linear = torch.arange(8)[None], nn.Linear(8, 8)
    compiled = torch.compile(linear, backend="overlapc")
    grads = []
    for block in (linear, compiled):
        embed = embedding()
        x = embed(tokens)
        assert isinstance(x, AsyncCollectiveTensor)
        assert not_waited_for((tokens, x)) == (1,)
        block(x).square().sum().backward()
        grads.append(embed.weight.grad.to_local())
    torch.testing.assert_close(grads[1], grads[0])
    assert grads[0].abs().sum() > 0


def test_without_gradients_it_is_waited_for_too():
    embed, linear = embedding(), nn.Linear(8, 8)
    with torch.no_grad():
        expected = linear(embed(torch.arange(8)[None]))
        found = torch.compile(linear, backend="overlapc")(embed(torch.arange(8)[None]))
    torch.testing.assert_close(found, expected + 0)
