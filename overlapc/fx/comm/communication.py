"""Tells which nodes of a graph communicate, and how."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from overlapc.fx.arguments import declared_arguments
from overlapc.fx.subgraphs import nodes_within
from overlapc.fx.versions.sharding import group_name_of
from overlapc.schedule.collective_kinds import KINDS

WAIT = torch.ops._c10d_functional.wait_tensor.default
_KINDS = {**{kind.op: kind.name for kind in KINDS.values()}, "shard_dim_alltoall": "all_to_all"}
_OURS = {"exchange": "all_to_all", "gather_blocks": "all_gather"}  # in overlapc's own namespace
# Namespaces of ops that communicate; those in the last three are of unknown kind.
_NAMESPACES = ("_c10d_functional", "_c10d_functional_autograd", "_dtensor", "c10d", "c10d_functional", "symm_mem")
# AOTAutograd's calls of an op, their first argument, that changes others of them in place: they change copies.
_FUNCTIONALIZED = (torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2)
_NOT_COMMUNICATION = ("wait_tensor", "_wrap_tensor_autograd", "mesh_get_process_group")


def is_collective(node: fx.Node) -> bool:
    """Whether `node` launches communication, of a known kind or not; true of a conditional if one of its branches does.

    A custom op is a collective if it takes the name of a process group (`group_name`), as torch's own collectives do.
    """
    namespace, name = op_of(node)
    if namespace in _NAMESPACES:
        return name not in _NOT_COMMUNICATION
    if namespace:
        return namespace not in ("aten", "prims") and group_of(node) is not None
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
    """Return the kind of a collective, as in `schedule.model.Comm`; "unknown" for point-to-point and other ops."""
    namespace, name = op_of(node)
    if node.target in _FUNCTIONALIZED:  # its results and arguments are not those of the op
        return "unknown"
    return _OURS.get(name, "unknown") if namespace == "overlapc" else _KINDS.get(_base(name), "unknown")


def group_of(node: fx.Node) -> str | None:
    """Return this rank's name of the process group that a collective runs on, or None if the op takes no group."""
    return next((group_name_of(given) for declared, given in _declared(node) if declared.name == "group_name"), None)


def variant_of(node: fx.Node) -> str:
    """Return the reduction of a collective if it is not a sum, or its number of blocks; see `Comm.variant`."""
    given = {declared.name: value for declared, value in _declared(node)}
    blocks = given.get("blocks", 1)
    return f"{blocks} blocks" if blocks != 1 else str(given.get("reduce_op", "sum")).replace("sum", "")


def _declared(node: fx.Node) -> Iterator[tuple[torch.Argument, Any]]:
    if node.target in _FUNCTIONALIZED:
        return declared_arguments(node.args[0], (), node.kwargs)
    return declared_arguments(node.target, node.args, node.kwargs)


def op_of(node: fx.Node) -> tuple[str, str]:
    """Return namespace and name of a node's op; both are empty if the node calls no torch op."""
    op = node.args[0] if node.target in _FUNCTIONALIZED else node.target
    if node.op == "call_function" and isinstance(op, torch._ops.OpOverload):
        return op.namespace, op._opname
    return "", ""


def _base(name: str) -> str:
    return name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
