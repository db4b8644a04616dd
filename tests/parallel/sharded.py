"""Tiny models under `fully_shard`, ours or FSDP2's, as users call it: each layer, then the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlapc.parallel import fully_shard
from tests.parallel.tiny import Tiny

Apply = Callable[..., Any]


def mesh_1d() -> DeviceMesh:
    """Four ranks on one axis."""
    return init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def shard(model: Tiny, mesh: DeviceMesh | None = None, apply: Apply = fully_shard, **how: Any) -> Tiny:
    """`model`, its layers and the rest of it groups of their own. how: options of `apply`."""
    mesh = mesh or mesh_1d()
    for module in (*model.layers, model):
        apply(module, mesh=mesh, **how)
    return model
