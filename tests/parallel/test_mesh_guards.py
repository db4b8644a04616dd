"""Dynamo does not guard on the parameters of a sharded model having their mesh object in common."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.guards import GuardBuilder

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
