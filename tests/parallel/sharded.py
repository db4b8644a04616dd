"""Models sharded by our or FSDP2's `fully_shard` as users call it: on each layer, then on the whole model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlapc.parallel import fully_shard

Apply = Callable[..., Any]
DIM = 6


class Block(nn.Module):
    """A residual block over the last dimension, of size DIM."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


def mesh_1d() -> DeviceMesh:
    """Return a mesh of four ranks on one axis."""
    return init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def shard(model: Any, mesh: DeviceMesh | None = None, apply: Apply = fully_shard, **how: Any) -> Any:
    """Shard each of `model.layers` and then the whole model with `apply(..., **how)`; return the model."""
    mesh = mesh or mesh_1d()
    for module in (*model.layers, model):
        apply(module, mesh=mesh, **how)
    return model
