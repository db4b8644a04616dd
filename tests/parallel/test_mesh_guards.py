"""Meshes of sharded parameters: Dynamo does not guard on a common one, and code outside of graphs gets their groups."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.guards import GuardBuilder
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from overlapc.fx.versions.dynamo import no_guards_on_equal_meshes
from overlapc.parallel import fully_shard
from tests.parallel.sharded import mesh_1d

pytestmark = pytest.mark.usefixtures("world", "fresh_dynamo")


@pytest.fixture
def same_objects(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources of all guards that two sources are one object."""
    no_guards_on_equal_meshes()
    found: list[str] = []
    install = GuardBuilder.DUPLICATE_INPUT

    def noted(self: GuardBuilder, guard: Any, source_b: Any) -> None:
        found.append(str(guard.originating_source))
        install(self, guard, source_b)

    monkeypatch.setattr(GuardBuilder, "DUPLICATE_INPUT", noted)
    return found


def test_parameters_are_not_compared_by_their_mesh(same_objects: list[str]) -> None:
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model, mesh=mesh_1d())
    torch.compile(model, backend="eager")(torch.randn(4, 8))
    assert not [source for source in same_objects if "device_mesh" in source]


def test_a_tensor_that_is_given_twice_is_guarded(same_objects: list[str]) -> None:
    def changed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x * y

    call, x, y = torch.compile(changed, backend="eager"), torch.ones(2), torch.ones(2)
    assert call(x, x).tolist() == [4, 4]
    assert same_objects
    assert call(x, y).tolist() == [3, 3]


class Experts(nn.Module):
    """Reads the group of its parameter's mesh in one graph, and returns it from another one."""

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "experts"))
        self.group = mesh["experts"].get_group()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh["experts"], [Shard(0)]))
        fully_shard(self, mesh=mesh["shards"])

    def forward(self, x: Tensor) -> tuple[Tensor, dist.ProcessGroup]:
        group = self.weight.device_mesh.get_group()
        y = x @ self.weight.to_local().T
        torch._dynamo.graph_break()
        return y * 2, group


def test_the_group_of_a_parameters_mesh_is_the_real_one_after_a_graph_break():
    model = Experts()
    _, group = torch.compile(model, backend="overlapc")(torch.ones(2, 4))
    assert group is model.group
