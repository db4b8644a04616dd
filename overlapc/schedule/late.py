"""Schedules whose collectives take longer than estimated, with which passes compare orders."""

from __future__ import annotations

from dataclasses import replace

from overlapc.schedule.model import Estimate, Node, Schedule


def with_late_collectives(schedule: Schedule, margin: float) -> Schedule:
    """Return `schedule` with each collective's estimate times `margin`. Cached; alike ones share nodes."""
    return schedule.fact("late", lambda: _late(schedule, margin), of=margin)


def late_node(node: Node, margin: float) -> Node:
    """Return `node` with its estimate times `margin` if it is a collective."""
    if node.comm is None or node.estimate is None:
        return node
    return replace(node, estimate=Estimate(node.estimate.ns * margin, node.estimate.source))


def _late(schedule: Schedule, margin: float) -> Schedule:
    like = schedule.like
    late, known = (None, {}) if like is None else (with_late_collectives(like, margin), _late_nodes(like, margin))
    return schedule.with_nodes([known.get(id(node)) or late_node(node, margin) for node in schedule.nodes], late)


def _late_nodes(schedule: Schedule, margin: float) -> dict[int, Node]:
    """Return the nodes of the late schedule by the id of the node that each is made of. Cached: many are like it."""
    pairs = zip(map(id, schedule.nodes), with_late_collectives(schedule, margin).nodes, strict=True)
    return schedule.fact("late nodes", lambda: dict(pairs), of=margin)
