"""Memory that a device holds while a graph runs, beyond the tensors of the graph."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from overlapc.report.model import GraphRecord
from overlapc.schedule.model import Buffer
from overlapc.schedule.text import parse

_BACKWARD = re.compile(r"backward_(\d+)$")


def peaks(graphs: Sequence[GraphRecord]) -> dict[str, int]:
    """Peak bytes while each graph runs: its own, and for a backward what only its forward was given (a parameter that
    no gradient needs stays where it is)."""
    named = {graph.name: graph for graph in graphs}
    found = {}
    for graph in graphs:
        forward = named.get(forward_of(graph.name))
        found[graph.name] = graph.peak_bytes + (0 if forward is None else held_bytes(inputs(forward), inputs(graph)))
    return found


def forward_of(name: str) -> str:
    """The name of the forward that belongs to a backward; "" for any other graph."""
    match = _BACKWARD.match(name)
    return f"forward_{match[1]}" if match else ""


def held_bytes(given: Mapping[str, Buffer], taken: Mapping[str, Buffer]) -> int:
    """Inputs of a forward that its backward does not take, neither as such nor as a saved view of one.

    What a backward takes and may not free is such a view (of a parameter) or its own argument.
    """
    held = sum(buffer.bytes for name, buffer in given.items() if name not in taken)
    views = sum(
        buffer.bytes
        for name, buffer in taken.items()
        if name not in given and not buffer.freeable and not name.startswith("tangents_")
    )
    return max(0, held - views)


def inputs(graph: GraphRecord) -> dict[str, Buffer]:
    """What a graph is given, by name."""
    return {name: buffer for name, buffer in parse(graph.schedule).buffers.items() if buffer.is_input}
