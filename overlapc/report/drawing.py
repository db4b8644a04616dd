"""A schedule as a graph for Graphviz: `dot -Tsvg schedule.dot > schedule.svg`.

Nodes are drawn in execution order from top to bottom. Arrows are dependences: solid for data, dashed for mutation and
weak order, dotted for the order of collectives and for barriers. Compute nodes are boxes, communication nodes ellipses
with a colour for each process group.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.model import Kind, Node, Schedule

_STYLES = {
    Why.DATA: "solid",
    Why.MUTATION: "dashed",
    Why.AFTER: "dashed",
    Why.COLLECTIVE_ORDER: "dotted",
    Why.BARRIER: "dotted",
}
_COLOURS = ("lightblue", "lightsalmon", "palegreen", "plum", "khaki", "lightgrey")


def to_dot(schedule: Schedule) -> str:
    """Return the text of a `.dot` file."""
    return "\n".join(["digraph schedule {", *(f"  {line}" for line in _statements(schedule)), "}"]) + "\n"


def _statements(schedule: Schedule) -> Iterator[str]:
    yield f"label={json.dumps(schedule.name)}; node [fontsize=10, style=filled, fillcolor=white];"
    colours: dict[str, str] = {}
    for at, node in enumerate(schedule.nodes):
        yield f"n{at} [{_look(schedule, at, node, colours)}];"
    for (before, after), why in dependencies.of(schedule).why.items():
        yield f"n{before} -> n{after} [style={_STYLES[why]}];"
    order = " -> ".join(f"n{at}" for at in range(len(schedule.nodes)))
    if order:
        yield f"{order} [style=invis, weight=10];"


def _look(schedule: Schedule, at: int, node: Node, colours: dict[str, str]) -> str:
    label = f"{node.name}\n{node.op}"
    if node.estimate is not None and node.estimate.ns:
        label += f" {node.estimate.ns / 1e3:.1f}us"
    launched = schedule.nodes[schedule.started[at]] if at in schedule.started else node
    if launched.comm is None:
        shape = "plaintext" if node.kind in (Kind.VIEW, Kind.NOOP) else "box"
        return f"label={json.dumps(label)}, shape={shape}"
    group = launched.comm.group
    colour = colours.setdefault(group, _COLOURS[len(colours) % len(_COLOURS)])
    return f"label={json.dumps(f'{label} @{launched.queue}')}, shape=ellipse, fillcolor={colour}"
