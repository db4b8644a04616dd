"""Several nodes that become one: what `bucket` and `share_launches` have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from overlapc.schedule.model import Node, Schedule


def merged_node(members: Sequence[Node], payload: Any) -> Node:
    """One node that does what all of `members` did, called `a+2` for three of which `a` is the first.

    What it costs (`work`, `comm`, `estimate`) is for who merges them to say.
    """
    first = members[0]
    return Node(
        name=f"{first.name}+{len(members) - 1}",
        kind=first.kind,
        op=first.op,
        reads=_union(member.reads for member in members),
        writes=_union(member.writes for member in members),
        mutates=_union(member.mutates for member in members),
        after=_union(member.after for member in members),
        scratch_bytes=sum(member.scratch_bytes for member in members),
        origin=replace(first.origin, fx=_union(member.origin.fx for member in members)),
        payload=payload,
    )


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """Every name of the parts once, in their order."""
    return tuple(dict.fromkeys(name for part in parts for name in part))


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
    nodes = tuple(after_renamed(node, renamed) for node in order)
    return replace(schedule, nodes=nodes, moved_from=None, collectives_moved=False, like=schedule)


def after_renamed(node: Node, renamed: Mapping[str, str]) -> Node:
    """`node` behind those that the nodes it was to come after are part of."""
    if not any(name in renamed for name in node.after):
        return node
    return replace(node, after=tuple(dict.fromkeys(renamed.get(name, name) for name in node.after)))
