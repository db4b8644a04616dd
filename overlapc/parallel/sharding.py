"""How parameters are laid out over a mesh: the sharded DTensor of each, and the data needed to gather it.

The layouts are FSDP2's (same placements, same rows on every rank), so that checkpoints interchange.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._prims_common import make_contiguous_strides_for
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from overlapc.errors import ConfigError
from overlapc.fx.versions.sharding import StridedShard, joined_mesh
from overlapc.parallel.gather import Axis, ShardedParam, ShardGroup, TensorParallel

# Mesh -> number of ranks -> the mesh for `reshard_after_forward`, and the default process group that it was made under.
_post_meshes: weakref.WeakKeyDictionary[
    DeviceMesh, dict[int, tuple[DeviceMesh, weakref.ReferenceType[dist.ProcessGroup]]]
] = weakref.WeakKeyDictionary()


def group_on(mesh: DeviceMesh, reshard_after_forward: bool | int | None) -> ShardGroup:
    """Return a group for parameters sharded over the last axis of `mesh`, and replicated over the first of two."""
    axes = _axes(mesh)
    group = ShardGroup(reshard_after_forward, axes[-1], axes[0] if len(axes) == 2 else None)
    group.post = _post_forward(mesh, group)
    return group


def _axes(mesh: DeviceMesh) -> list[Axis]:
    if mesh.ndim > 2:
        raise ConfigError(
            f"fully_shard: the mesh has {mesh.ndim} axes {mesh.mesh_dim_names}; pass the data-parallel one (FSDP) "
            "or two (HSDP), such as mesh['dp']"
        )
    names = mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else ("dp_replicate", "dp_shard"))
    return [Axis(name, mesh.get_group(dim).group_name, mesh.size(dim)) for dim, name in enumerate(names)]


def _post_forward(mesh: DeviceMesh, group: ShardGroup) -> tuple[Axis, int] | None:
    """Return the axis for `reshard_after_forward=int` and this rank's place on it; None for all ranks or one."""
    count = group.reshard_after_forward
    if count is None or isinstance(count, bool):
        return None
    if count < 1 or group.axis.size % count:
        raise ConfigError(
            f"fully_shard: reshard_after_forward={count} does not divide the {group.axis.size} ranks of "
            f"mesh axis {group.axis.name!r}"
        )
    if count in (1, group.axis.size):
        group.reshard_after_forward = count > 1
        return None
    meshes = _post_meshes.setdefault(mesh, {})  # process groups are expensive; all parameters should share one queue
    world, made = dist.group.WORLD, meshes.get(count)
    assert world is not None
    # An equal mesh may be left from process groups that were destroyed since; its groups' names may mean others now.
    if made is None or made[1]() is not world:
        ranks = mesh.mesh.view(-1, count)
        names = (f"{group.axis.name}_outer", f"{group.axis.name}_post")
        made = meshes[count] = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names), weakref.ref(world)
    small = made[0]
    return Axis(f"{group.axis.name}_post", small.get_group(1).group_name, count), small.get_local_rank(1)


@dataclass(frozen=True)
class Sharding:
    """What the parameters of one `fully_shard` call have in common: mesh, group and dtypes."""

    mesh: DeviceMesh
    group: ShardGroup
    policy: MixedPrecisionPolicy

    @property
    def device(self) -> torch.device:
        """This rank's device in the mesh."""
        kind = self.mesh.device_type
        return (
            torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
        )

    @torch.no_grad()
    def shard(self, name: str, param: nn.Parameter, dim: int, part: int = 0) -> tuple[nn.Parameter, ShardedParam]:
        """Return the DTensor parameter, sharded on `dim`, that replaces `param`, and how to gather it.

        part: the index of its module in the group. Raises ConfigError if `param` cannot be sharded on `dim`.
        """
        if param.ndim == 0:
            raise ConfigError(f"fully_shard: parameter {name} is a scalar; make it a tensor of one element")
        if not -param.ndim <= dim < param.ndim:
            raise ConfigError(f"fully_shard: parameter {name} has {param.ndim} dims; it cannot be sharded on dim {dim}")
        dim %= param.ndim
        full_mesh, placements = _placements(name, param, self.mesh, dim)
        local = param.to_local() if isinstance(param, DTensor) else param.detach()
        length, ranks = local.shape[dim], self.group.axis.size
        chunk = -(-length // ranks)
        if dim and length % ranks:
            raise ConfigError(
                f"fully_shard: parameter {name} has size {length} on dim {dim}, not divisible by the {ranks} ranks;"
                " only dim 0 may be sharded unevenly"
            )
        start = min(self.mesh.get_local_rank(self.mesh.ndim - 1) * chunk, length)
        # A copy, so that the unsharded parameter can be freed.
        mine = local.narrow(dim, start, min(chunk, length - start)).clone(memory_format=torch.contiguous_format)
        if not mine.is_meta:
            mine = mine.to(self.device)
        dtensor = DTensor.from_local(
            mine,
            full_mesh,
            placements,
            run_check=False,
            shape=param.shape,
            stride=make_contiguous_strides_for(param.shape),
        )
        sharded = nn.Parameter(dtensor, requires_grad=param.requires_grad)
        return sharded, self.describe(name, sharded, dim, length, part)

    def describe(self, name: str, param: nn.Parameter, dim: int, length: int, part: int = 0) -> ShardedParam:
        """Return how to gather `param`, a DTensor sharded on `dim` over `mesh` and perhaps over tensor-parallel axes.

        length: the size of `dim` in the gathered tensor, on this tensor-parallel rank.
        """
        data = param.data
        assert isinstance(data, DTensor)
        parallel = _tensor_parallel(data, self.mesh)
        if parallel is not None and self.group.post is not None:
            raise ConfigError(
                f"fully_shard: parameter {name} is tensor parallel; reshard_after_forward must be True or False there"
            )
        return ShardedParam(
            name=name,
            group=self.group,
            dim=dim,
            length=length,
            chunk=-(-length // self.group.axis.size),
            local=data.to_local().shape[dim],
            param_dtype=self.policy.param_dtype,
            reduce_dtype=self.policy.reduce_dtype,
            tensor_parallel=parallel,
            part=part,
        )


def _placements(name: str, param: Tensor, mesh: DeviceMesh, dim: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return mesh and placements of the sharded parameter: those of FSDP2, so that checkpoints interchange."""
    replicate: tuple[Placement, ...] = (Replicate(),) * (mesh.ndim - 1)
    if not isinstance(param, DTensor):
        return mesh, (*replicate, Shard(dim))
    other = param.device_mesh
    names = (mesh.mesh_dim_names or ()) + (other.mesh_dim_names or ())
    joined = joined_mesh(mesh, other) if len(set(names)) == mesh.ndim + other.ndim else None
    if joined is None:
        raise ConfigError(
            f"fully_shard: parameter {name} is a DTensor on mesh axes {other.mesh_dim_names}, which are not other "
            f"axes of the same mesh as {mesh.mesh_dim_names}; slice both from one init_device_mesh(...)"
        )
    # The dim is sharded a second time, inside the tensor-parallel shard. The data-parallel axis comes first in the mesh
    # but divides last, which is what StridedShard means.
    split = 1
    for axis, placement in enumerate(param.placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            split *= other.size(axis)
    placed: Placement = StridedShard(dim, split_factor=split) if split > 1 else Shard(dim)
    return joined, (*replicate, placed, *param.placements)


def _tensor_parallel(param: DTensor, mesh: DeviceMesh) -> TensorParallel | None:
    """Return mesh and placements of a parameter once gathered over `mesh`; None if it is a plain tensor then."""
    names = (param.device_mesh.mesh_dim_names or ())[mesh.ndim :]
    if not names:
        return None
    other = param.device_mesh[names]  # from its own mesh: the root may not have axes of these names
    return TensorParallel(other, tuple(param.placements[mesh.ndim :]), param.shape, tuple(param.stride()))
