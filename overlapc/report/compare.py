"""Measured and predicted times side by side, for every collective and kernel and for the whole step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from tabulate import tabulate

from overlapc.estimators.calibration.observed import APART
from overlapc.report.held_memory import graphs_peak_bytes
from overlapc.report.model import GraphRecord, StepRecord
from overlapc.report.parsed_schedules import schedule_of
from overlapc.report.times import ms, us
from overlapc.schedule.model import Kind, Node
from overlapc.units import human_bytes

FAR_OFF = 0.20  # predictions with a larger relative error are flagged
_WORST = 8  # number of nodes with the largest errors that the totals list
_KINDS = {Kind.START: "collective", Kind.COMM: "collective", Kind.KERNEL: "kernel", Kind.EXTERN: "library call"}
_HEADERS = ("node", "what", "of", "alone µs", "predicted µs", "measured µs", "ratio", "")
_ALIGN = ("left", "left", "left", "right", "right", "right", "right", "left")


@dataclass(frozen=True, slots=True)
class Row:
    """Predicted and measured time of one node. The prediction includes the slowdown by work that overlaps the node."""

    node: str
    kind: str  # "collective", "kernel" or "library call"
    what: str  # op and size
    origin: str
    alone_ns: float | None  # the estimate; None: unknown
    predicted_ns: float
    measured_ns: float | None  # None: the profiler saw nothing of it
    beside: float | None = None  # fraction of the measured time in which compute and communication overlapped

    @property
    def ratio(self) -> float | None:
        """Measured time divided by predicted time; None if either is missing."""
        if self.measured_ns is None or self.alone_ns is None or self.predicted_ns <= 0:
            return None
        return self.measured_ns / self.predicted_ns

    @property
    def alone_ratio(self) -> float | None:
        """Measured time divided by the estimate; None if the node was overlapped, or if either is missing."""
        if self.beside is None or self.beside > APART or not self.alone_ns or self.measured_ns is None:
            return None
        return self.measured_ns / self.alone_ns

    @property
    def slowdown_error(self) -> float | None:
        """Error of the predicted contention in percent of the estimate; None unless the whole node was overlapped."""
        if self.beside is None or self.beside < 1 - APART or not self.alone_ns or self.measured_ns is None:
            return None
        return 100 * abs(self.measured_ns - self.predicted_ns) / self.alone_ns

    @property
    def far_off(self) -> bool:
        """Whether the node was measured, and its prediction is missing or wrong by more than FAR_OFF."""
        ratio = self.ratio
        return self.measured_ns is not None and (ratio is None or abs(ratio - 1) > FAR_OFF)

    @property
    def lost_ns(self) -> float:
        """Absolute error of the prediction in ns; 0 if the node was not measured."""
        return abs((self.measured_ns or 0.0) - self.predicted_ns) if self.measured_ns is not None else 0.0


def rows(graph: GraphRecord) -> list[Row]:
    """Return a row for every launched node in the final order; no rows for a graph that was not measured."""
    if graph.measured is None:
        return []
    spans = {span.node: span for span in graph.after.spans if span.kind != "idle"}
    found = []
    for node in schedule_of(graph).nodes:
        if node.kind not in _KINDS:
            continue
        span = spans.get(node.name)
        found.append(
            Row(
                node.name,
                _KINDS[node.kind],
                _what(node),
                span.origin if span is not None else "",
                node.estimate.ns if node.estimate is not None else None,
                span.end_ns - span.start_ns if span is not None else 0.0,
                graph.measured.nodes.get(node.name),
                graph.measured.beside.get(node.name),
            )
        )
    return found


def _what(node: Node) -> str:
    if node.comm is not None:
        return f"{node.op} {human_bytes(node.comm.bytes)} @{node.comm.group}"
    work = node.work
    if work is None:
        return node.op
    if work.flops and node.kind is Kind.EXTERN:
        return f"{node.op} {work.flops / 1e9:.3g} GFLOP"
    return f"{node.op} {human_bytes(work.read_bytes + work.write_bytes)}"


def graph_text(graph: GraphRecord) -> str:
    """Return the table of all nodes of a measured graph."""
    table = tabulate([_cells(row) for row in rows(graph)], _HEADERS, colalign=_ALIGN, disable_numparse=True)
    return f"graph {graph.name}, predicted and measured\n{table}"


def _cells(row: Row) -> tuple[str, ...]:
    ratio = row.ratio
    return (
        row.node,
        row.what,
        row.origin[-36:],
        "unknown" if row.alone_ns is None else us(row.alone_ns),
        us(row.predicted_ns),
        "not seen" if row.measured_ns is None else us(row.measured_ns),
        "" if ratio is None else f"{ratio:.2f}",
        "off" if row.far_off else "",
    )


def totals_text(step: StepRecord) -> str:
    """Return times of the step and of each graph, accuracy of the predictions by kind, and the largest errors."""
    graphs = [graph for graph in step.graphs if graph.measured is not None]
    times = {graph.name: calls for graph, calls in step.called}
    table = [row for graph in graphs for row in _graph_totals(graph)]
    if len(graphs) > 1 or any(calls > 1 for calls in times.values()):
        table += _sum(table, times)
    lines = [
        f"predicted and measured ({min(graph.measured.runs for graph in graphs if graph.measured)} run(s))",
        tabulate(
            [(graph, what, ms(a), ms(b), f"{b / a:.2f}" if a else "") for graph, what, a, b in table],
            ("graph", "", "predicted", "measured", "ratio"),
            colalign=("left", "left", "right", "right", "right"),
            disable_numparse=True,
        ),
    ]
    if step.measured_peak_bytes is not None and graphs:
        peak = graphs_peak_bytes(step, graphs)
        without = "" if step.optimizer_bytes else "; allocated memory includes optimizer state and other tensors"
        lines.append(
            f"peak memory  {human_bytes(peak)} predicted, {human_bytes(step.measured_peak_bytes)} allocated at most "
            f"(ratio {step.measured_peak_bytes / max(peak, 1):.3f}{without})"
        )
    every = [row for graph in graphs for row in rows(graph)]
    lines += _quality(every)
    worst = sorted((row for row in every if row.far_off), key=lambda row: -row.lost_ns)[:_WORST]
    if worst:
        shown = tabulate([_cells(row) for row in worst], _HEADERS, colalign=_ALIGN, disable_numparse=True)
        lines.append(f"most time off by more than {FAR_OFF:.0%}:\n{shown}")
    return "\n".join(lines)


_Total = tuple[str, str, float, float]  # graph, what, predicted ns, measured ns


def _graph_totals(graph: GraphRecord) -> Iterator[_Total]:
    measured = graph.measured
    assert measured is not None
    for what, predicted_ns in _predicted(graph).items():
        if measured.shows_communication or what in ("step", "compute"):
            yield graph.name, what, predicted_ns, getattr(measured, _FIELDS[what])


_FIELDS = {
    "step": "step_ns", "compute": "compute_ns", "communication": "comm_ns", "exposed": "exposed_ns", "idle": "idle_ns",
}  # fmt: skip


def _predicted(graph: GraphRecord) -> dict[str, float]:
    compute = comm = 0.0
    for span in graph.after.spans:
        if span.kind != "idle":
            taken = span.end_ns - span.start_ns
            compute, comm = (compute + taken, comm) if span.lane == "compute" else (compute, comm + taken)
    exposed = graph.exposed_after_ns
    idle = max(0.0, graph.after.step_ns - compute - exposed)
    return {"step": graph.after.step_ns, "compute": compute, "communication": comm, "exposed": exposed, "idle": idle}


def _sum(table: Iterable[_Total], times: Mapping[str, int]) -> list[_Total]:
    """Return the totals of one step, which calls each graph `times[graph]` times: those that every graph has."""
    found: dict[str, list[tuple[float, float]]] = {}
    for graph, what, predicted_ns, measured_ns in table:
        calls = times.get(graph, 0)
        found.setdefault(what, []).append((predicted_ns * calls, measured_ns * calls))
    graphs = len(found.get("step", ()))
    return [
        ("one step", what, sum(predicted for predicted, _ in each), sum(measured for _, measured in each))
        for what, each in found.items()
        if len(each) == graphs
    ]


def _quality(every: Iterable[Row]) -> Iterator[str]:
    """Yield for each kind of node `collectives: 74 of 74 measured, half within 7%, 9 off by more than 20%`.

    Further lines separate errors of the estimates (from nodes that ran alone) from errors of the predicted contention
    (from nodes that were overlapped for their whole duration), as far as there are such nodes.
    """
    by_kind: dict[str, list[Row]] = {}
    for row in every:
        by_kind.setdefault(row.kind, []).append(row)
    for kind, found in sorted(by_kind.items()):
        errors = [abs(ratio - 1) for row in found if (ratio := row.ratio) is not None]
        half = f"half within {median(errors):.0%}" if errors else "none predicted"
        unseen = sum(row.measured_ns is None for row in found)
        yield (
            f"{kind}s: {len(found) - unseen} of {len(found)} measured, {half}, "
            f"{sum(row.far_off for row in found)} off by more than {FAR_OFF:.0%}"
        )
        alone = [ratio for row in found if (ratio := row.alone_ratio) is not None]
        if alone:
            off = median(abs(ratio - 1) for ratio in alone)
            yield f"  {len(alone)} without overlap: half within {off:.0%}, {median(alone):.2f} of the estimate"
        beside = [points for row in found if (points := row.slowdown_error) is not None]
        if beside:
            error = f"{median(beside):.0f} percentage points of their time without overlap"
            yield f"  {len(beside)} overlapped throughout: half within {error}"
