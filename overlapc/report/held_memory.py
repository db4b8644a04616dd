"""Peak memory of a whole step, including memory that is live beside the tensors of the running graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from overlapc.graph_names import forward_of
from overlapc.report.model import GraphRecord, StepRecord
from overlapc.report.parsed_schedules import schedule_of
from overlapc.schedule.model import Buffer
from overlapc.units import human_bytes


def step_peak_bytes(step: StepRecord) -> int:
    """Return the peak memory of a step: of its graphs plus the optimizers' state, or of the optimizers' update."""
    return max(graphs_peak_bytes(step), step.update_peak_bytes)


def peak_parts(step: StepRecord) -> str:
    """Describe what `step_peak_bytes` includes besides the tensors of graphs and what it omits; "" for inference."""
    trains = [times for graph, times in step.called if forward_of(graph.name)]
    parts = []
    in_graphs = graphs_peak_bytes(step)
    if step.update_peak_bytes > in_graphs:
        parts.append(f"while the optimizer steps ({human_bytes(in_graphs)} in the compiled graphs)")
    if step.optimizer_bytes:
        names, state_bytes = " and ".join(sorted(step.optimizer_bytes)), sum(step.optimizer_bytes.values())
        state = f"{human_bytes(state_bytes)} of it is the state of {names}"
        parts.append(state if state_bytes else f"{names} keeps no state")
    elif trains:
        parts.append("optimizer state is not included")
    if max(trains, default=0) > 1:
        parts.append("gradients of earlier micro-batches are not included")
    return "; ".join(parts)


def graphs_peak_bytes(step: StepRecord, graphs: Sequence[GraphRecord] | None = None) -> int:
    """Return the peak memory of `graphs` (default: those that a step calls), plus the optimizers' state."""
    chosen = [graph for graph, _ in step.called] if graphs is None else graphs
    return max(peaks(chosen).values(), default=0) + sum(step.optimizer_bytes.values())


def peaks(graphs: Sequence[GraphRecord]) -> dict[str, int]:
    """Return the peak bytes while each graph runs, by name.

    For a backward, inputs that only its forward received are added: they stay allocated, for example a parameter that
    no gradient needs. What ranks share for copies counts for every graph as for the one that needs most.
    """
    named = {graph.name: graph for graph in graphs}
    shared_bytes = max((graph.pool_bytes for graph in graphs), default=0)
    found = {}
    for graph in graphs:
        forward = named.get(forward_of(graph.name))
        held = 0 if forward is None else held_bytes(inputs(forward), inputs(graph))
        found[graph.name] = graph.peak_bytes + shared_bytes - graph.pool_bytes + held
    return found


def held_bytes(given: Mapping[str, Buffer], taken: Mapping[str, Buffer]) -> int:
    """Return the bytes of a forward's inputs (`given`) that its backward receives neither directly nor as a saved view.

    An input of the backward (`taken`) that it may not free, and that is no tangent, is a view of a forward's input.
    """
    held = sum(buffer.bytes for name, buffer in given.items() if name not in taken)
    views = sum(
        buffer.bytes
        for name, buffer in taken.items()
        if name not in given and not buffer.freeable and not name.startswith("tangents_")
    )
    return max(0, held - views)


def inputs(graph: GraphRecord) -> dict[str, Buffer]:
    """Return the input buffers of a graph by name."""
    return {name: buffer for name, buffer in schedule_of(graph).buffers.items() if buffer.is_input}
