"""An optimizer created before `fully_shard` holds replaced, unused parameters: its first step warns, once."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.device_mesh import init_device_mesh

import overlapc
from tests.worlds import fake_world


@pytest.fixture
def model() -> Iterator[nn.Module]:
    with fake_world(2):
        yield nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def sharded(model: nn.Module) -> nn.Module:
    return overlapc.fully_shard(model, init_device_mesh("cpu", (2,)))


def warned(optimizer: torch.optim.Optimizer) -> list[str]:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        optimizer.step()
        optimizer.step()
    assert all(each.filename == __file__ for each in seen)
    return [str(each.message) for each in seen]


def test_an_optimizer_of_parameters_that_were_replaced_warns_once(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    sharded(model)
    (text,) = warned(optimizer)
    assert text.startswith("this AdamW does not train 4 of its 4 parameters (0.weight, 0.bias, 1.weight and 1 more)")
    assert "create the optimizer after overlapc.fully_shard" in text


def test_an_optimizer_of_the_sharded_parameters_does_not_warn(model: nn.Module) -> None:
    assert warned(torch.optim.AdamW(sharded(model).parameters())) == []


def test_a_replaced_parameter_that_still_gets_gradients_does_not_warn(model: nn.Module) -> None:
    other = nn.Sequential(model[0])
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    weight = model[0].weight
    sharded(model)
    for param in optimizer.param_groups[0]["params"]:
        param.grad = torch.zeros_like(param)
    assert warned(optimizer) == []
    assert weight is not model[0].weight


def test_a_compiled_optimizer_step_is_one_graph(model: nn.Module, fresh_dynamo: None) -> None:
    sharded(model)
    graphs = CompileCounter()
    plain = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    step = torch.compile(optimizer.step, backend=graphs)
    for _ in range(2):
        for param in plain.parameters():
            param.grad = torch.ones_like(param)
        step()
    assert graphs.frame_count == 1
