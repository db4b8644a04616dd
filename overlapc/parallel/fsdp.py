"""`fully_shard` with FSDP2's arguments; its gathers and reductions are nodes of the compiled graph.

    for block in model.layers:
        overlapc.fully_shard(block, mesh)
    overlapc.fully_shard(model, mesh)

Each call makes one group of the parameters that no inner call manages. They become DTensor parameters, sharded on
dim 0 unless `shard_placement_fn` says otherwise, under the same names in `state_dict()`. Inside forward, reading one
returns the gathered tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from overlapc.errors import ConfigError
from overlapc.parallel.access import groups_of, make_group, manage, name_groups
from overlapc.parallel.gather import ShardedParam
from overlapc.parallel.replaced import replace_by, replaced_by
from overlapc.parallel.sharding import Sharding, group_on
from overlapc.parallel.unreduced import managed

_Modules = TypeVar("_Modules", bound="nn.Module | Sequence[nn.Module]")


def fully_shard(
    module: _Modules,
    mesh: DeviceMesh | None = None,
    *,
    mp_policy: MixedPrecisionPolicy | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Collection[nn.Parameter] | None = None,
) -> _Modules:
    """Shard the parameters of `module` that no inner call manages, in place, and return `module`.

    module: a module, or a list of modules whose parameters form one group, such as the last norm and the head.
    mesh: one axis shards (FSDP); two axes replicate over the first and shard over the second (HSDP). Default:
        all ranks. Parameters that are DTensors already (`parallelize_module`) must lie on other axes of the
        same root mesh.
    mp_policy: torch's policy; `param_dtype` and `reduce_dtype` set its fields of the same name.
    reshard_after_forward: True gathers again in backward, False keeps the gathered parameters, an int keeps
        them sharded over that many ranks (in a forward that is not one graph: like True). None, like FSDP2: True, but
        False for the outermost module.
    shard_placement_fn: returns the dim to shard a parameter on, as `Shard(dim)`, or None for dim 0. Other dims must
        divide evenly, and cost a copy of the gathered parameter and of its gradient. torch's `ShardPlacementResult`
        is accepted if it names no other mesh.
    offload_policy: only FSDP2's default, which offloads nothing.
    ignored_params: neither sharded nor reduced.

    Compile the outermost module: no compute hides the communication of blocks that are compiled one by one. A module
    whose forward is not one graph (it runs eagerly, or breaks the graph) gathers all its parameters when it begins.

    Raises ConfigError for a mesh, module, parameter or option that cannot be used.
    """
    modules = _checked(module)
    policy = _policy(mp_policy, param_dtype, reduce_dtype)
    if isinstance(offload_policy, CPUOffloadPolicy):
        raise ConfigError(
            "fully_shard: overlapc does not support CPU offload; leave out offload_policy, and save memory with"
            " memory_budget or activation checkpointing"
        )
    mesh = _default_mesh() if mesh is None else mesh
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(f"fully_shard: mesh={mesh!r} is not a DeviceMesh; make one with init_device_mesh(...)")
    group = group_on(mesh, reshard_after_forward)
    group.paths = [""] * len(modules)
    sharding = Sharding(mesh, group, policy)
    ignored = {id(param) for param in ignored_params or ()}

    for part, path, owner in _own_modules(modules):
        mine: dict[str, ShardedParam] = {}
        for name, param in owner._parameters.items():
            if param is None or name in managed(owner) or id(param) in ignored:
                continue
            _refuse_owner(owner, _joined(path, name))
            # Tied parameters stay tied; a parameter tied across groups belongs to the group that was made first.
            known = replaced_by(param)
            if known is None:
                dim = _placed(shard_placement_fn(param), mesh) if shard_placement_fn else 0
                known = sharding.shard(_joined(path, name), param, dim, part)
                replace_by(param, _joined(path, name), known)
            owner._parameters[name], mine[name] = known
        manage(owner, mine)
        for name, buffer in owner._buffers.items():
            if buffer is not None and not buffer.is_meta:
                owner._buffers[name] = buffer.to(sharding.device)

    for part, each in enumerate(modules):
        make_group(each, [group], policy, part)
        name_groups(each)
    return module


def _checked(given: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules given to one call, without those that lie inside another of them."""
    modules = [given] if isinstance(given, nn.Module) else list(given)
    if not modules:
        raise ConfigError("fully_shard: the list of modules is empty")
    for module in modules:
        if not isinstance(module, nn.Module):
            raise ConfigError(f"fully_shard: {module!r} is not a module")
        if groups_of(module) is not None:
            raise ConfigError(f"fully_shard: this {type(module).__name__} is already sharded; call it once per module")
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            raise ConfigError(f"fully_shard: {type(module).__name__} has no forward; shard the modules in it")
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if id(module) not in inner]


def _policy(
    given: MixedPrecisionPolicy | None, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None
) -> MixedPrecisionPolicy:
    policy = given or MixedPrecisionPolicy()
    for name, dtype in (("param_dtype", param_dtype), ("reduce_dtype", reduce_dtype)):
        if dtype is not None and getattr(policy, name) not in (None, dtype):
            raise ConfigError(f"fully_shard: {name}={dtype} but mp_policy.{name}={getattr(policy, name)}; pass one")
    return dataclasses.replace(
        policy,
        param_dtype=param_dtype or policy.param_dtype,
        reduce_dtype=reduce_dtype or policy.reduce_dtype,
    )


def _placed(placement: Any, mesh: DeviceMesh) -> int:
    """Return the dim that a `shard_placement_fn` chose by a Shard, None, or torch's ShardPlacementResult."""
    other = getattr(placement, "mesh_info", None)
    if other is not None and other.mesh != mesh:
        raise ConfigError(
            f"fully_shard: shard_placement_fn places a parameter on {other.mesh}, not on mesh={mesh}; call fully_shard"
            " for the modules of each mesh, or shard with FSDP2 and call adopt_fsdp2"
        )
    placement = getattr(placement, "placement", placement)
    return 0 if placement is None else int(placement.dim)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise ConfigError("fully_shard: no mesh given and no process group; run under torchrun or pass a mesh")
    accelerator = torch.accelerator.current_accelerator(check_available=True)  # else CUDA of a build that finds no GPU
    return init_device_mesh(
        accelerator.type if accelerator else "cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)
    )


def _refuse_owner(owner: nn.Module, param: str) -> None:
    """Raise ConfigError for a module that does not read its parameters as attributes."""
    if isinstance(owner, nn.RNNBase):
        raise ConfigError(
            f"fully_shard: {param} belongs to a {type(owner).__name__}, which reads its weights from a list of its own "
            "and would miss the gathered ones; pass them as ignored_params"
        )


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _own_modules(roots: Sequence[nn.Module]) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (index of the root, path from it, module) for all modules of the roots, without those of inner groups.

    A module that is reached twice is yielded once.
    """
    seen: set[int] = set()
    for part, root in enumerate(roots):
        pending = [("", root)]
        while pending:
            path, module = pending.pop()
            if id(module) in seen or (module is not root and groups_of(module) is not None):
                continue
            seen.add(id(module))
            yield part, path, module
            children = [(_joined(path, name), child) for name, child in module.named_children()]
            pending.extend(reversed(children))
