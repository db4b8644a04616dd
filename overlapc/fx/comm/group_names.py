"""Names of process groups that are equal on all ranks."""

from __future__ import annotations

import torch.distributed as dist
from torch import fx

from overlapc.fx.comm.communication import group_of, is_collective, kind_of
from overlapc.fx.comm.labels import label_of
from overlapc.fx.subgraphs import nodes_within
from overlapc.fx.versions.sharding import resolve_group

OURS = "overlapc_"  # prefix of `group_desc` of groups that overlapc created; their name in schedules follows it


def ranks_of(group: str) -> tuple[int, ...]:
    """Return the global ranks of the process group that torch calls `group`."""
    return tuple(dist.get_process_group_ranks(resolve_group(group)))


def groups_within(node: fx.Node) -> list[str]:
    """Return torch's names of the process groups that the graphs nested in `node` use, in their order."""
    groups = (group_of(inner) for inner in nodes_within(node) if is_collective(inner))
    return list(dict.fromkeys(group for group in groups if group is not None))


class GroupNames:
    """Names of a graph's process groups that are equal on all ranks, and differ between groups.

    torch numbers its groups per process, so torch's names differ between ranks. A group's name here is the first that
    exists of: the name that overlapc gave it; the mesh axis in the labels that `fully_shard` wrote on its nodes; the
    axis that `DeviceMesh` wrote into the group's description; "world"; "group". If several groups have the same name,
    all except the first get a number, such as "group.2" (in graph order, which is the same on all ranks). Groups that
    only nested graphs use come last.
    """

    def __init__(self, graph: fx.Graph) -> None:
        axis_of: dict[str, str] = {}
        order: dict[str, None] = {}
        for node in graph.nodes:
            group = group_of(node) if is_collective(node) else None
            if group is None:
                continue
            order.setdefault(group)
            label = label_of(node)
            if label is not None:
                axis = label.replicate_axis if kind_of(node) == "all_reduce" else label.axis
                if group == label.post_group:
                    axis = f"{label.axis}_post"
                axis_of.setdefault(group, axis)
        order |= dict.fromkeys(group for node in graph.nodes for group in groups_within(node))
        self._names: dict[str, str] = {}
        self._ranks = {group: ranks_of(group) for group in order}
        taken: dict[str, int] = {}
        for group in order:
            name = _ours(group) or axis_of.get(group) or _described(group)
            count = taken.get(name, 0)
            taken[name] = count + 1
            self._names[group] = f"{name}.{count + 1}" if count else name

    def __getitem__(self, group: str) -> str:
        """Return the name of the group that torch calls `group`; KeyError if the graph does not use it."""
        return self._names[group]

    def ranks(self, group: str) -> tuple[int, ...]:
        """Return the global ranks of the group that torch calls `group`; KeyError if the graph does not use it."""
        return self._ranks[group]


def _ours(group: str) -> str:
    description: str = resolve_group(group).group_desc
    return description.removeprefix(OURS) if description.startswith(OURS) else ""


def _described(group: str) -> str:
    description = resolve_group(group).group_desc
    if description.startswith("mesh_") and description != "mesh_default":
        return description.removeprefix("mesh_")
    return "world" if len(ranks_of(group)) == dist.get_world_size() else "group"
