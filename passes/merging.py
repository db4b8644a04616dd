"""Merge several nodes into one: what `bucket` and `share_launches` have in common."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from overlapc.schedule.model import Node, Schedule


def merged_node(members: Sequence[Node], payload: Any) -> Node:
    """Return one node that does the work of all `members`; its name is `a+2` for three nodes of which `a` is the first.

    The caller has to set what it costs (`work`, `comm`, `estimate`).
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
    """Return every name in the parts once, in order."""
    return tuple(dict.fromkeys(name for part in parts for name in part))


def with_merged(
    schedule: Schedule, inserted: Mapping[int, Sequence[Node]], removed: Collection[int], renamed: Mapping[str, str]
) -> Schedule:
    """Return a schedule with merged nodes. Dependences among its collectives follow its own order, not `schedule`'s.

    inserted: position -> nodes to insert there, in front of the node at that position. removed: positions of nodes to
    remove, because they were merged or are inserted elsewhere. renamed: merged node -> the node that replaces it.
    """
    order: list[Node] = []
    for at, node in enumerate(schedule.nodes):
        order += inserted.get(at, ())
        if at not in removed:
            order.append(node)
    nodes = tuple(after_renamed(node, renamed) for node in order)
    return replace(schedule, nodes=nodes, moved_from=None, collectives_moved=False, like=schedule)


def after_renamed(node: Node, renamed: Mapping[str, str]) -> Node:
    """Return `node` with each merged node in its `after` replaced by the node that it was merged into."""
    if not any(name in renamed for name in node.after):
        return node
    return replace(node, after=tuple(dict.fromkeys(renamed.get(name, name) for name in node.after)))
