"""`fully_shard`: FSDP2's names and meaning, with gathers and reductions as nodes of the compiled graph.

    for block in model.layers:
        overlapc.fully_shard(block, mesh)
    overlapc.fully_shard(model, mesh)

Each call makes one group of the parameters that no inner call manages. They become DTensor parameters sharded on
dim 0, under the same names in `state_dict()`; reading one inside forward gives the gathered tensor.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Collection, Iterator
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from overlapc.errors import ConfigError
from overlapc.fx.versions import StridedShard, root_mesh
from overlapc.parallel.access import group_of, make_group, manage, managed
from overlapc.parallel.gather import Axis, ShardedParam, ShardGroup, TensorParallel

_Module = TypeVar("_Module", bound=nn.Module)
_post_meshes: weakref.WeakKeyDictionary[DeviceMesh, dict[int, DeviceMesh]] = weakref.WeakKeyDictionary()


def fully_shard(
    module: _Module,
    mesh: DeviceMesh | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool | int | None = None,
    ignored_params: Collection[nn.Parameter] = (),
) -> _Module:
    """Shard the parameters of `module` that no inner call manages, in place; returns `module`.

    mesh: one axis shards (FSDP); two axes replicate over the first and shard over the second (HSDP). Default:
        all ranks. Parameters that are DTensors already (`parallelize_module`) must lie on other axes of the
        same root mesh.
    mp_policy: torch's policy; `param_dtype` and `reduce_dtype` are short for its fields of that name.
    reshard_after_forward: True gathers again in backward, False keeps the gathered parameters, an int keeps
        them sharded over that many ranks. None, like FSDP2: True, but False for the outermost module.
        Outside of a compiled graph gathered parameters are always kept.
    ignored_params: left alone: neither sharded nor reduced.

    Compile the outermost module. Compiled block by block, each block is compiled anew (its parameters have names of
    their own in the graph), which Dynamo stops after `torch._dynamo.config.recompile_limit` blocks. Functions that
    Dynamo is told to skip (`torch.compiler.disable`) see sharded parameters when called from compiled code.

    Raises ConfigError for a mesh, module, parameter or option that cannot be used.
    """
    if group_of(module) is not None:
        raise ConfigError(f"fully_shard: this {type(module).__name__} is already sharded; call it once a module")
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        raise ConfigError(f"fully_shard: {type(module).__name__} has no forward; shard the modules in it")
    policy = _policy(mp_policy, param_dtype, reduce_dtype)
    mesh = _default_mesh() if mesh is None else mesh
    axes = _axes(mesh)
    group = ShardGroup(reshard_after_forward, axes[-1], axes[0] if len(axes) == 2 else None)
    group.post = _post_forward(mesh, group)
    device = _device(mesh)
    ignored = {id(param) for param in ignored_params}

    sharded: dict[int, tuple[nn.Parameter, ShardedParam]] = {}  # by id of the original: tied ones stay tied
    for owner_path, owner in _own_modules(module):
        mine: dict[str, ShardedParam] = {}
        for name, param in owner._parameters.items():
            if param is None or name in managed(owner) or id(param) in ignored:
                continue
            if id(param) not in sharded:
                path = f"{owner_path}.{name}" if owner_path else name
                if isinstance(owner, nn.RNNBase):
                    raise ConfigError(
                        f"fully_shard: {path} belongs to a {type(owner).__name__}, which reads its weights from a "
                        "list of its own and would miss the gathered ones; pass them as ignored_params"
                    )
                # A parameter tied to one in another group belongs to the group that came first.
                earlier = getattr(param, "_overlapc_sharded", None)
                sharded[id(param)] = earlier or _shard(path, param, mesh, group, policy, device)
                param._overlapc_sharded = sharded[id(param)]  # type: ignore[attr-defined]
            owner._parameters[name], mine[name] = sharded[id(param)]
        manage(owner, mine)
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(device)

    make_group(module, group, policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype)
    for path, inner in module.named_modules():
        inner_group = group_of(inner)
        if inner_group is not None:
            inner_group.path = path
    return module


def _policy(
    given: MixedPrecisionPolicy | None, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> MixedPrecisionPolicy:
    policy = given or MixedPrecisionPolicy()
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and getattr(policy, name) not in (None, dtype):
            raise ConfigError(f"fully_shard: {name}={dtype} but mp_policy.{name}={getattr(policy, name)}; give one")
    return dataclasses.replace(
        policy,
        param_dtype=param_dtype or policy.param_dtype,
        reduce_dtype=reduce_dtype or policy.reduce_dtype,
    )


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise ConfigError("fully_shard: no mesh given and no process group; run under torchrun or pass a mesh")
    accelerator = torch.accelerator.current_accelerator()
    return init_device_mesh(
        accelerator.type if accelerator else "cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)
    )


def _axes(mesh: DeviceMesh) -> list[Axis]:
    if mesh.ndim > 2:
        raise ConfigError(
            f"fully_shard: the mesh has {mesh.ndim} axes {mesh.mesh_dim_names}; pass the data-parallel one (FSDP) "
            "or two (HSDP), such as mesh['dp']"
        )
    names = mesh.mesh_dim_names or (("dp",) if mesh.ndim == 1 else ("dp_replicate", "dp_shard"))
    return [Axis(name, mesh.get_group(dim).group_name, mesh.size(dim)) for dim, name in enumerate(names)]


def _post_forward(mesh: DeviceMesh, group: ShardGroup) -> tuple[Axis, int] | None:
    """The axis of `reshard_after_forward=int` ranks and our rank on it; None for all ranks or one."""
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
    meshes = _post_meshes.setdefault(mesh, {})  # groups are costly, and one queue is meant to serve all
    if count not in meshes:
        ranks = mesh.mesh.view(-1, count)
        names = (f"{group.axis.name}_outer", f"{group.axis.name}_post")
        meshes[count] = DeviceMesh(mesh.device_type, ranks, mesh_dim_names=names)
    small = meshes[count]
    return Axis(f"{group.axis.name}_post", small.get_group(1).group_name, count), small.get_local_rank(1)


def _device(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def _own_modules(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of `root` and all below it, but not of inner groups; a shared module once."""
    seen: set[int] = set()
    pending = [("", root)]
    while pending:
        path, module = pending.pop()
        if id(module) in seen or (module is not root and group_of(module) is not None):
            continue
        seen.add(id(module))
        yield path, module
        children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
        pending.extend(reversed(children))


@torch.no_grad()
def _shard(
    name: str,
    param: nn.Parameter,
    mesh: DeviceMesh,
    group: ShardGroup,
    policy: MixedPrecisionPolicy,
    device: torch.device,
) -> tuple[nn.Parameter, ShardedParam]:
    """The sharded DTensor parameter that replaces `param`, and how to gather it."""
    if param.ndim == 0:
        raise ConfigError(f"fully_shard: parameter {name} is a scalar; make it a tensor of one element")
    full_mesh, placements, parallel = _placements(name, param, mesh)
    if parallel is not None and group.post is not None:
        raise ConfigError(
            f"fully_shard: parameter {name} is tensor parallel; reshard_after_forward must be True or False there"
        )
    local = param.to_local() if isinstance(param, DTensor) else param.detach()
    axis = group.axis
    rows = local.shape[0]
    chunk_rows = -(-rows // axis.size)
    start = min(mesh.get_local_rank(mesh.ndim - 1) * chunk_rows, rows)
    local_rows = min(chunk_rows, rows - start)
    # A copy, so that the unsharded parameter can be freed.
    shard = local.narrow(0, start, local_rows).clone(memory_format=torch.contiguous_format)
    if not shard.is_meta:
        shard = shard.to(device)
    dtensor = DTensor.from_local(
        shard, full_mesh, placements, run_check=False, shape=param.shape, stride=_contiguous_stride(param)
    )
    # FSDP2's rule: casts that change nothing are dropped, and integer parameters are never cast.
    floating = param.dtype.is_floating_point
    param_dtype = policy.param_dtype if floating and policy.param_dtype != param.dtype else None
    computed = param_dtype or param.dtype
    reduced = policy.reduce_dtype or computed
    reduce_op, before, after = _mean(group, reduced, mesh.device_type)
    description = ShardedParam(
        name=name,
        group=group,
        ndim=param.ndim,
        rows=rows,
        chunk_rows=chunk_rows,
        local_rows=local_rows,
        dtype=param.dtype,
        param_dtype=param_dtype,
        reduce_dtype=reduced if reduced != computed else None,
        reduce_op=reduce_op,
        divide_before=before,
        divide_after=after,
        tensor_parallel=parallel,
    )
    return nn.Parameter(dtensor, requires_grad=param.requires_grad), description


def _placements(
    name: str, param: Tensor, mesh: DeviceMesh
) -> tuple[DeviceMesh, tuple[Placement, ...], TensorParallel | None]:
    """Mesh and placements of the sharded parameter, the ones FSDP2 gives it, so that checkpoints interchange."""
    replicate: tuple[Placement, ...] = (Replicate(),) * (mesh.ndim - 1)
    if not isinstance(param, DTensor):
        return mesh, (*replicate, Shard(0)), None
    other = param.device_mesh
    root = root_mesh(mesh)
    names = (mesh.mesh_dim_names or ()) + (other.mesh_dim_names or ())
    if root_mesh(other) is not root or len(names) != mesh.ndim + other.ndim or len(set(names)) != len(names):
        raise ConfigError(
            f"fully_shard: parameter {name} is a DTensor on mesh axes {other.mesh_dim_names}, which are not other "
            f"axes of the same mesh as {mesh.mesh_dim_names}; slice both from one init_device_mesh(...)"
        )
    # Sharding dim 0 a second time, inside the tensor-parallel shard: the data-parallel axis comes first in the
    # mesh but cuts last, which is what a strided shard says.
    split = 1
    for dim, placement in enumerate(param.placements):
        if isinstance(placement, Shard) and placement.dim == 0:
            split *= other.size(dim)
    shard: Placement = StridedShard(0, split_factor=split) if split > 1 else Shard(0)
    parallel = TensorParallel(other, tuple(param.placements), param.shape, tuple(param.stride()))
    return root[names], (*replicate, shard, *param.placements), parallel


def _contiguous_stride(param: Tensor) -> tuple[int, ...]:
    stride = [1]
    for size in reversed(param.shape[1:]):
        stride.insert(0, stride[0] * max(size, 1))
    return tuple(stride)


def _mean(group: ShardGroup, dtype: torch.dtype, device_type: str) -> tuple[str, float, float]:
    """(reduction, divisor before, divisor after) of gradients, as FSDP2 chooses them.

    NCCL averages by itself; elsewhere a sum is divided where it is smallest, after the scatter. In fp16 a sum
    over ranks could overflow, so half of the division happens before.
    """
    ranks = group.axis.size * (group.replicate.size if group.replicate else 1)
    if ranks == 1:
        return "sum", 1.0, 1.0
    if dtype not in (torch.float32, torch.bfloat16, torch.float64):
        before = 1
        while ranks % before == 0 and ranks / before > before:
            before *= 2
        return "sum", float(before), ranks / before
    if device_type == "cuda":
        return "avg", 1.0, 1.0
    return "sum", 1.0, float(ranks)
