"""Several nodes that become one: what `bucket` and `share_launches` have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from overlapc.schedule.model import Node, Schedule


def union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Every name of the parts once, in their order."""
    return tuple(dict.fromkeys(name for part in parts for name in part))


def merged_name(members: Sequence[Node]) -> str:
    """`a+2` for three nodes of which `a` is the first."""
    return f"{members[0].name}+{len(members) - 1}"


def with_merged(
    schedule: Schedule, instead: Mapping[int, Sequence[Node]], gone: Collection[int], renamed: Mapping[str, str]
) -> Schedule:
    """A new schedule: its order is the one that dependences among collectives count from.

    instead: by position, what stands there, before the node that does if that one is not gone. gone: positions of
    nodes that are part of others, or stand elsewhere. renamed: a node that is part of another -> that one.
    """
    order: list[Node] = []
    for at, node in enumerate(schedule.nodes):
        order += instead.get(at, ())
        if at not in gone:
            order.append(node)
    nodes = tuple(_after_renamed(node, renamed) for node in order)
    return Schedule(schedule.name, nodes, schedule.buffers, schedule.outputs, schedule.budget_bytes)


def _after_renamed(node: Node, renamed: Mapping[str, str]) -> Node:
    if not any(name in renamed for name in node.after):
        return node
    return replace(node, after=tuple(dict.fromkeys(renamed.get(name, name) for name in node.after)))
