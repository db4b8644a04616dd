"""Which nodes of a graph communicate, and how."""

from __future__ import annotations

import torch
from torch import fx

from overlapc.fx.arguments import declared_arguments
from overlapc.fx.subgraphs import nodes_within
from overlapc.fx.versions import group_name_of
from overlapc.schedule.collective_kinds import KINDS

WAIT = torch.ops._c10d_functional.wait_tensor.default
_KINDS = {**{kind.op: kind.name for kind in KINDS.values()}, "shard_dim_alltoall": "all_to_all"}
_OURS = {"exchange": "all_to_all", "gather_blocks": "all_gather"}  # in overlapc's own namespace
# The ops of the last three are unknown; all of them communicate.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "c10d_functional", "symm_mem")
_NOT_COMMUNICATION = ("wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group")


def is_collective(node: fx.Node) -> bool:
    """Whether `node` launches communication, known to us or not; a conditional whose branch does launches it too.

    A custom op does if it takes the name of a process group (`group_name`), as torch's own do.
    """
    namespace, name = op_of(node)
    if namespace in _NAMESPACES:
        return name not in _NOT_COMMUNICATION
    if namespace not in ("", "aten", "prims") and group_of(node) is not None:
        return True
    return any(is_collective(inner) for inner in nodes_within(node))


def is_wait(node: fx.Node) -> bool:
    """Whether `node` blocks until a collective is done."""
    return node.target is WAIT


def is_asynchronous(node: fx.Node) -> bool:
    """Whether `node` launches a collective of known kind that needs a wait."""
    namespace, name = op_of(node)
    return name in _OURS if namespace == "overlapc" else _is_torchs(namespace, name)


def _is_torchs(namespace: str, name: str) -> bool:
    return namespace == "_c10d_functional" and _base(name) in _KINDS and not name.endswith(("_", "_out"))


def kind_of(node: fx.Node) -> str:
    """What `schedule.model.Comm.collective` calls it; "unknown" for point-to-point and new ops."""
    namespace, name = op_of(node)
    return _OURS.get(name, "unknown") if namespace == "overlapc" else _KINDS.get(_base(name), "unknown")


def group_of(node: fx.Node) -> str | None:
    """This rank's name of the process group that a collective runs on, or None if it names none."""
    arguments = declared_arguments(node.target, node.args, node.kwargs)
    return next((group_name_of(given) for declared, given in arguments if declared.name == "group_name"), None)


def op_of(node: fx.Node) -> tuple[str, str]:
    """Namespace and name of a node's op; empty for what is no op of torch's."""
    if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace, node.target._opname
    return "", ""


def _base(name: str) -> str:
    return name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
