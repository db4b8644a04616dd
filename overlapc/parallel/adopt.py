"""Convert a model that FSDP2 sharded, so that its collectives become nodes of the compiled graph.

    for block in model.layers:
        torch.distributed.fsdp.fully_shard(block, mesh=mesh)
    torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    step = torch.compile(overlapc.adopt_fsdp2(model), backend="overlapc")

FSDP2 gathers and reduces in hooks that Dynamo does not trace (torch 2.11 to 2.13 disable it for them), so a compiler
sees only the compute between them. `adopt_fsdp2` removes the hooks and keeps the same DTensor parameters, which
overlapc's `fully_shard` then manages: existing optimizers and checkpoints keep working.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel

from overlapc.errors import ConfigError
from overlapc.fx.versions.sharding import fsdp2_groups, fsdp2_original, fsdp2_state, release_fsdp2
from overlapc.parallel.access import FSDPModule, make_group, manage, name_groups
from overlapc.parallel.controls import REFUSED
from overlapc.parallel.gather import ShardedParam, ShardGroup
from overlapc.parallel.sharding import Sharding, group_on

_Module = TypeVar("_Module", bound=nn.Module)


def adopt_fsdp2(model: _Module) -> _Module:
    """Take over every module of `model` that FSDP2 manages, in place, with the same groups and options; return `model`.

    Call it after all `fully_shard` calls, before `torch.compile`. Nothing is copied or communicated. A model that
    overlapc manages already is left as it is.

    Raises ConfigError if FSDP2 manages no module of `model`, while gradients wait to be reduced, for tied parameters
    that two calls took, and for features that overlapc does not have: CPU offload, all-gather extensions, replicated
    (DDP) parameters.
    """
    states = {id(state): state for module in model.modules() if (state := fsdp2_state(module)) is not None}
    if not states and any(isinstance(module, FSDPModule) for module in model.modules()):
        return model
    if not states:
        raise ConfigError(f"adopt_fsdp2: FSDP2 manages no module of this {type(model).__name__}: {_why_none(model)}")
    paths = {module: path for path, module in model.named_modules()}
    for state in states.values():
        _refuse(state, paths)
    _refuse_ties_between_calls(states.values(), paths)
    for state in states.values():
        _adopt(state)
    name_groups(model)
    return model


def _why_none(model: nn.Module) -> str:
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        return (
            "it is wrapped in DistributedDataParallel, which shards nothing and reduces gradients in autograd hooks."
            " Instead of that wrapper, use overlapc.fully_shard(model, mesh): on a mesh of (ranks, 1), with"
            " mesh_dim_names=('replicate', 'shard'), it keeps all parameters on each rank and reduces gradients in the"
            " graph"
        )
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return (
            "it is wrapped in FSDP1's FullyShardedDataParallel; shard it with overlapc.fully_shard, or with"
            " torch.distributed.fsdp.fully_shard, instead"
        )
    return (
        "call it after torch.distributed.fsdp.fully_shard, or call overlapc.fully_shard in its place. Where a trainer"
        " shards the model, call it on what the trainer prepared (accelerate: after accelerator.prepare)"
    )


def _refuse(state: Any, paths: dict[nn.Module, str]) -> None:
    """Raise ConfigError, before anything is changed, for an FSDP2 feature that overlapc does not have."""
    where = paths.get(state._modules[0]) or "the model"
    groups = fsdp2_groups(state)
    for group in groups:
        if group.mesh_info.shard_mesh_dim is None:
            raise ConfigError(
                f"adopt_fsdp2: parameters of {where} are replicated, not sharded; fully_shard with"
                " reshard_after_forward=False communicates as much and uses less memory (torchtitan:"
                " parallelism.data_parallel_shard_degree)"
            )
        if not group.reduce_grads:
            raise ConfigError(
                f"adopt_fsdp2: {where} does not reduce its gradients now; call adopt_fsdp2 before"
                " set_requires_gradient_sync(False), which the adopted model has, too"
            )
        if _has_unreduced_gradients(group):
            raise ConfigError(
                f"adopt_fsdp2: {where} has gradients that FSDP2 has not reduced yet; call adopt_fsdp2 before the first"
                " micro-batch of an optimizer step, or after its last one"
            )
        if getattr(group, "reduce_scatter_unused_params", False):
            raise ConfigError(f"adopt_fsdp2: {where}: {REFUSED['set_reduce_scatter_unused_params']}")
        if group._all_reduce_hook is not None:
            raise ConfigError(f"adopt_fsdp2: {where} has an all-reduce hook: {REFUSED['set_all_reduce_hook']}")
        if getattr(group.mesh_info, "is_spmd_mesh", False):
            raise ConfigError(
                f"adopt_fsdp2: {where} was sharded with dp_mesh_dims, on a mesh of all parallelisms; shard it on the"
                " data-parallel axes alone (torchtitan: parallelism.spmd_backend=partial_dtensor)"
            )
        for param in group.fsdp_params:
            name = f"parameter {param._module_info.param_name} of {where}"
            if param.offload_to_cpu:
                raise ConfigError(
                    f"adopt_fsdp2: {name} is offloaded to the CPU, which overlapc does not support; leave out"
                    " offload_policy (accelerate: cpu_offload; torchtitan: training.enable_cpu_offload), and save"
                    " memory with memory_budget or activation checkpointing"
                )
            if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
                raise ConfigError(
                    f"adopt_fsdp2: {name} is a {type(param._sharded_local_tensor).__name__}, which changes what FSDP2"
                    " gathers; turn that off (float8 training: enable_fsdp_float8_all_gather=False)"
                )


def _has_unreduced_gradients(group: Any) -> bool:
    """Whether FSDP2 keeps gradients of a backward without gradient sync, or those of one without all-reduce."""
    gradients = [group._partial_reduce_output]
    for param in group.fsdp_params:
        gathered = getattr(param, "_unsharded_param", None)  # since the first forward
        gradients += [param.unsharded_accumulated_grad, gathered.grad if gathered is not None else None]
    return any(gradient is not None for gradient in gradients)


def _refuse_ties_between_calls(states: Iterable[Any], paths: dict[nn.Module, str]) -> None:
    """Raise ConfigError if two `fully_shard` calls took one parameter: each sharded it, so it is two now."""
    first: dict[int, str] = {}
    for param in (param for state in states for group in fsdp2_groups(state) for param in group.fsdp_params):
        original, info = fsdp2_original(param), param._module_info
        name = f"{paths.get(info.module, '')}.{info.param_name}".lstrip(".")
        if original in first:
            raise ConfigError(
                f"adopt_fsdp2: {name} was tied to {first[original]}, but two calls of fully_shard took one each:"
                " they would be trained as two parameters (FSDP2 itself refuses this in its first forward). Give both"
                " modules to one call: fully_shard([module_a, module_b], ...)"
            )
        if original is not None:
            first[original] = name


def _adopt(state: Any) -> None:
    """Convert the modules and parameters of one call of FSDP2's `fully_shard`."""
    modules, policy = state._modules, state._mp_policy
    for group in fsdp2_groups(state):
        group._to_sharded()
    release_fsdp2(state)  # first: it restores the modules' classes, from which ours are derived
    places = _places(modules)
    found: list[ShardGroup] = []  # one per mesh; none if inner calls took all parameters
    for group in fsdp2_groups(state):
        mesh = group.mesh_info.mesh
        ours = group_on(mesh, _reshard_after_forward(state, group))
        sharding = Sharding(mesh, ours, policy)
        ours.paths = [""] * len(modules)
        found.append(ours)
        for param in group.fsdp_params:
            info = param._module_info
            dim = param.fsdp_placement.dim
            part, path = places.get(info.module, (0, ""))
            name = f"{path}.{info.param_name}" if path else info.param_name
            sharded = sharding.describe(name, param.sharded_param, dim, param._orig_size[dim], part)
            _manage(info, dataclasses.replace(sharded, divisor=group.gradient_divide_factor))
    for part, module in enumerate(modules):
        make_group(module, found, policy, part)


def _manage(info: Any, sharded: ShardedParam) -> None:
    """Manage the parameter in every module that it is registered in, including those that tie it."""
    places = [(info.module, info.param_name), *zip(info.shared_modules, info.shared_param_names, strict=True)]
    for module, name in places:
        manage(module, {name: sharded})


def _places(modules: Sequence[nn.Module]) -> dict[nn.Module, tuple[int, str]]:
    """Return for each module which of `modules`, those given to `fully_shard`, it lies in (an index), and its path."""
    places: dict[nn.Module, tuple[int, str]] = {}
    for part, module in enumerate(modules):
        for path, inner in module.named_modules():
            places.setdefault(inner, (part, path))
    return places


def _reshard_after_forward(state: Any, group: Any) -> bool | int | None:
    """Return the `reshard_after_forward` that the user gave to FSDP2."""
    if state._auto_reshard_after_forward:
        return None
    after = group.post_forward_mesh_info
    if after is None:
        return False
    return True if after is group.mesh_info else after.shard_mesh_size
