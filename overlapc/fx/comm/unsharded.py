"""Replaces unsharded parameters that a graph fills and frees by the value that fills them.

FSDP2 keeps each unsharded parameter as a tensor without storage (S23 in docs/COVERAGE.md). A traced graph then has

    resize(p, full); fsdp.copy_(p, gathered); y = mm(x, p); resize(p, 0)   ->   y = mm(x, gathered)

`remove_fills` replaces every region of this form, for every input, including layers that are used twice. The parameter
is then never written, and the gathered tensor is freed after its last use.

Regions of another form than `full, copy, reads, 0` stay, with a warning. A graph in which the user writes into an
unsharded parameter is rejected, because the change would be lost when the storage is freed.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.fsdp  # registers the ops
from torch import Tensor, fx

from overlapc.errors import CompileError
from overlapc.fx.arguments import argument, declared_arguments, is_written
from overlapc.fx.source import user_line

aten = torch.ops.aten
_RESIZE = torch.ops.inductor.resize_storage_bytes_.default
_FILL = torch.ops.fsdp.copy_.default

# The schema of torch's resize does not declare that it changes its argument, which the scheduler needs to know.
_library = torch.library.Library("overlapc", "FRAGMENT")
_library.define("resize_storage_(Tensor(a!) tensor, SymInt bytes) -> ()")


@torch.library.impl(_library, "resize_storage_", "CompositeExplicitAutograd")
def _resize_storage(tensor: Tensor, size_bytes: int) -> None:
    tensor.untyped_storage().resize_(size_bytes)


fx.node.has_side_effect(torch.ops.overlapc.resize_storage_.default)


@dataclass
class _Region:
    """The nodes from a resize to full size up to the resize to 0."""

    begin: fx.Node
    fill: fx.Node | None = None
    reads: list[fx.Node] = field(default_factory=list)
    end: fx.Node | None = None


def remove_fills(graph: fx.Graph) -> int:
    """Remove the regions of all inputs; return their number. CompileError if the user writes into a parameter."""
    position = {node: at for at, node in enumerate(graph.nodes)}
    removed = 0
    resized: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="call_function", target=_RESIZE):
        resized[argument(node, 0)].append(node)
    for param in resized:
        regions = _regions(param, sorted(param.users, key=position.__getitem__))
        if isinstance(regions, str):
            warnings.warn(f"overlapc cannot remove the storage resizes of {param.name}: {regions}", stacklevel=2)
            for node in resized[param]:
                node.target = torch.ops.overlapc.resize_storage_.default
            continue
        for region in regions:
            assert region.fill is not None
            assert region.end is not None
            value = argument(region.fill, 1)
            for read in region.reads:
                read.replace_input_with(param, value)
            for node in (region.begin, region.fill, region.end):
                graph.erase_node(node)
            removed += 1
    return removed


def _regions(param: fx.Node, users: list[fx.Node]) -> list[_Region] | str:
    """Return the regions of an unsharded parameter, or the reason why they cannot be removed from the graph."""
    full = _bytes(param.meta["val"])
    regions: list[_Region] = []
    for user in users:
        current = regions[-1] if regions and regions[-1].end is None else None
        if user.target is _RESIZE:
            size = argument(user, 1)
            if size == full and current is None:
                regions.append(_Region(user))
            elif size == 0 and current is not None and current.fill is not None:
                current.end = user
            else:
                return f"{user.name} resizes it to {size} bytes in an unexpected place (its full size is {full} bytes)"
        elif user.target is _FILL and argument(user, 0) is param:
            if current is None or current.fill is not None or current.reads:
                return f"{user.name} fills it a second time, or without a resize to full size"
            if not _alike(param, argument(user, 1)):
                return f"{user.name} fills it with a tensor of another shape, stride or dtype"
            current.fill = user
        elif _writes(user, param):
            raise CompileError(
                f"{user.name} = {user.target} writes into {param.name}, an unsharded parameter of FSDP2\n"
                f"   {user_line(user) or 'unknown line'}\n"
                "The change would be lost when the parameter is resharded.\n"
                "hint: change the sharded parameter, outside of forward and backward"
            )
        elif current is None or current.fill is None or user.op == "output":
            return f"{user.name} reads it while it has no storage"
        else:
            current.reads.append(user)
    if regions and regions[-1].end is None:
        return "it is not resized to 0 bytes at the end"
    return regions


def _writes(user: fx.Node, param: fx.Node) -> bool:
    """Whether the schema of an op declares that it writes into `param`."""
    return any(
        is_written(declared) and (given is param or (isinstance(given, (list, tuple)) and param in given))
        for declared, given in declared_arguments(user.target, user.args, user.kwargs)
    )


def _alike(param: fx.Node, value: Any) -> bool:
    """Whether `value` has the shape, strides and dtype of `param`, so that it can be read instead of a copy."""
    if not isinstance(value, fx.Node):
        return False
    ours, given = param.meta["val"], value.meta["val"]
    return ours.shape == given.shape and ours.stride() == given.stride() and ours.dtype == given.dtype


def _bytes(tensor: Tensor) -> Any:
    return tensor.numel() * tensor.element_size()
