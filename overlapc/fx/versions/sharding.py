"""FSDP2's state, DDP, meshes and process groups."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed._composable.contract import STATE_KEY
from torch.distributed._composable_state import _get_module_state, _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn.parallel import DistributedDataParallel

StridedShard = _StridedShard

# The file of the function that `register_fsdp_forward_method` puts in place of a method.
FORWARD_METHODS_FILE = register_fsdp_forward_method.__code__.co_filename


def joined_mesh(first: DeviceMesh, second: DeviceMesh) -> DeviceMesh | None:
    """Return the mesh with the axes of `first` and then of `second`, as FSDP2 makes it.

    None if the two are not distinct axes of one mesh. Axes of unflattened meshes have no common root that knows their
    names.
    """
    if not (first.mesh_dim_names and second.mesh_dim_names):
        return None
    try:
        with unset_fake_temporarily():  # a model may be planned on fake tensors, but ranks are counted on real ones
            return DeviceMesh._concatenate([first, second])
    except RuntimeError:  # other ranks, or overlapping ones
        return None


def in_backward() -> bool:
    """Whether the autograd engine runs on this thread, for example when an eager checkpoint repeats its forward."""
    return torch._C._current_graph_task_id() != -1


def fsdp2_state(module: nn.Module) -> Any:
    """Return FSDP2's state of a module that was passed to its `fully_shard`, else None."""
    return _get_module_state(module) if isinstance(module, FSDPModule) else None


def fsdp2_groups(state: Any) -> list[Any]:
    """Return the parameter groups of one `fully_shard` call; torch 2.11 has one at most."""
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [] if state._fsdp_param_group is None else [state._fsdp_param_group]
    return list(groups)


def fsdp2_original(param: Any) -> int | None:
    """Return the number of the parameter that FSDP2 sharded, equal for tied ones; None with torch 2.11."""
    found: int | None = getattr(param, "_orig_param_uid", None)
    return found


def release_fsdp2(state: Any) -> None:
    """Undo what FSDP2's `fully_shard` did to its modules, except for their parameters, which stay sharded."""
    handles = [state._pre_forward_hook_handle, state._post_forward_hook_handle]
    for group in fsdp2_groups(state):
        handles += group._module_to_pre_save_state_dict_hook_handle.values()
        handles += group._module_to_pre_load_state_dict_hook_handle.values()
        handles += [param._post_load_hook_handle for param in group.fsdp_params]
    for handle in handles:
        handle.remove()
    for module in state._modules:
        del _module_state_mapping[module]
        module.__class__ = next(cls for cls in type(module).__mro__[1:] if not issubclass(cls, FSDPModule))
        for inner in module.modules():
            for mark in ("_is_fsdp_managed_module", "_fsdp_use_orig_params"):
                inner.__dict__.pop(mark, None)


def set_fsdp2_state(module: nn.Module, state: Any) -> None:
    """Make `torch.distributed.fsdp.fully_shard.state(module)` return `state`, for torch code that calls it."""
    states = module.__dict__.setdefault(STATE_KEY, {})
    states[fully_shard.__wrapped__] = state  # type: ignore[attr-defined]


def runs_under_fsdp2() -> bool:
    """Whether a module that FSDP2 manages is running its forward."""
    states = {id(state): state for ref in _module_state_mapping.values() if (state := ref()) is not None}
    return any(getattr(getattr(state, "_training_state", None), "name", "") == "FORWARD" for state in states.values())


def runs_under_ddp() -> bool:
    """Whether a DistributedDataParallel module is running its forward."""
    return DistributedDataParallel._get_active_ddp_module() is not None


def group_name_of(group: Any) -> str | None:
    """Return the name of a collective's process group from the argument in the graph; None if there is none.

    The argument is a string in torch 2.11; in 2.13 it may be a ProcessGroup, or a node that reads one from a mesh
    input.
    """
    if isinstance(group, fx.Node):
        group = group.meta.get("val")
    group = getattr(group, "real_obj", group)  # FakeScriptObject
    if group is None or isinstance(group, str):
        return group
    return group.group_name


def resolve_group(name: str) -> Any:
    """Return this process's process group with that name."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    return _resolve_process_group(name)  # type: ignore[arg-type]
