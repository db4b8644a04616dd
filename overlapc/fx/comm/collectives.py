"""The collectives of a canonical graph, and the data that each moves."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, fx

from overlapc.errors import CompileError
from overlapc.fx.comm.communication import group_of, is_asynchronous, is_collective, is_wait, kind_of, op_of, variant_of
from overlapc.fx.comm.exchange import EXCHANGE
from overlapc.fx.comm.group_names import GroupNames, groups_within
from overlapc.fx.comm.labels import ParamLabel, label_of
from overlapc.fx.versions.tensors import size_hint
from overlapc.schedule.collective_kinds import KINDS
from overlapc.schedule.model import Comm

_SELF_WAITING = frozenset({"_dtensor::shard_dim_alltoall"})  # blocking, with no effect except its result


@dataclass(frozen=True, slots=True)
class Collective:
    """One launch of a collective in a graph."""

    start: fx.Node
    waits: tuple[fx.Node, ...]  # one for each output, in output order; empty if the launch itself blocks
    comm: Comm
    label: ParamLabel | None  # the sharded parameter it serves, if any

    @property
    def synchronous(self) -> bool:
        """Whether the launch itself blocks until the collective is done, so that no compute can hide it."""
        return not self.waits

    @property
    def unread(self) -> bool:
        """Whether no node reads its result, so that `drop_unread` would remove it."""
        return not self.synchronous and not any(wait.users for wait in self.waits)


def find_collectives(graph: fx.Graph, safe: frozenset[str] = frozenset()) -> list[Collective]:
    """Return every collective of a canonical graph, in order.

    safe: ops (`namespace::name`) of unknown kind that other collectives may be moved across.
    """
    names = GroupNames(graph)
    return [
        Collective(node, tuple(_waits(node)), describe(node, names, safe), label_of(node))
        for node in graph.nodes
        if is_collective(node)
    ]


def communicates(graph: fx.Graph) -> bool:
    """Whether the graph, or one nested in it, launches a collective."""
    return any(map(is_collective, graph.nodes))


def describe(node: fx.Node, names: GroupNames, safe: frozenset[str] = frozenset()) -> Comm:
    """Describe the communication of `node`. Its bytes are those of a gather's output, or of a scatter's input."""
    kind = kind_of(node)
    group = group_of(node)
    if kind in KINDS and KINDS[kind].output_sized and node.target is not EXCHANGE:  # its output lacks this rank's part
        moved = _tensors(node.meta.get("val"))
    else:
        moved = _tensors([*node.args, *node.kwargs.values()] if kind == "unknown" else node.args[0])
    if not moved and kind != "unknown":
        raise CompileError(f"{node.name}: {node.target} has no tensor metadata to size it by")
    ranks = names.ranks(group) if group else _ranks_within(node, names)
    label = label_of(node)
    return Comm(
        collective=kind,
        bytes=sum(size_hint(tensor.numel()) * tensor.element_size() for tensor in moved),
        group=names[group] if group else "unknown",
        size=len(ranks),
        dtype=str(moved[0].dtype).removeprefix("torch.") if moved else "",
        ranks=ranks,
        unit=unit_of(label),
        param=param_of(node),
        param_number=-1 if label is None else label.number,
        variant=variant_of(node),
        safe=not is_asynchronous(node) and "::".join(op_of(node)) in safe | _SELF_WAITING,
    )


def _ranks_within(node: fx.Node, names: GroupNames) -> tuple[int, ...]:
    """Return the ranks of a conditional whose branches communicate; with several groups, all ranks of the job."""
    groups = groups_within(node)
    return names.ranks(groups[0]) if len(groups) == 1 else tuple(range(dist.get_world_size())) if groups else ()


def unit_of(label: ParamLabel | None) -> str:
    """Return `Comm.unit` of a labelled parameter: the module given to `fully_shard`, which is gathered as a whole."""
    return "" if label is None else label.group or "root"


def param_of(node: fx.Node) -> str:
    """Return `Comm.param` of a collective: the sharded parameter that it serves; "" for none."""
    label = label_of(node)
    return "" if label is None or label.number < 0 else label.param


def outputs_of(start: fx.Node) -> list[fx.Node]:
    """Return the nodes that hold the launch's tensors: the launch itself, or the parts of a coalesced one in order."""
    if not isinstance(start.meta.get("val"), (list, tuple)):
        return [start]
    parts = [user for user in start.users if user.target is operator.getitem]
    return sorted(parts, key=_part_index)


def _part_index(part: fx.Node) -> int:
    index = part.args[1]
    assert isinstance(index, int)
    return index


def _waits(start: fx.Node) -> Iterator[fx.Node]:
    if is_asynchronous(start):
        for output in outputs_of(start):
            yield from (user for user in output.users if is_wait(user))


def _tensors(value: Any) -> list[Tensor]:
    """Return the fake tensors of a node, a list of nodes, or a `meta["val"]`."""
    if isinstance(value, fx.Node):
        value = value.meta.get("val")
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []
