"""Why communication is still exposed, and what a user can change about it.

Passes record for each collective which rule stopped its start and its wait (`CollectiveRow.causes`). This module maps
these rules to a few causes, each with an explanation and advice, and adds up the exposed time of a step by cause.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from overlapc.passes.reasons import Reason
from overlapc.report.model import CollectiveRow, GraphRecord, Span, StepRecord

_LEAST = 0.01  # fraction of all exposed time; causes that cost less are not listed
_LITTLE = 0.1  # fraction of a collective's time; compute shorter than that hides a negligible part of it


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause of exposed communication; `advice` is empty if the user can change nothing about it."""

    why: str
    advice: str = ""


MEMORY = Cause(
    "more collectives in flight at once would exceed the memory limit",
    "a larger memory_budget; without one, a larger peak_increase",
)
BARRIER = Cause(
    "communication is not moved across an op whose own communication is unknown to overlapc",
    "add that op to safe_communication, if other collectives may move across it",
)
COLLECTIVE_ORDER = Cause(
    "collectives of one process group keep their order",
    "reorder_collectives=1, if it is off; separate process groups for collectives that should not wait for each other",
)
END = Cause(
    "the graph ends here: no compute is left to hide this communication",
    "overlapc.no_sync, to reduce once for several micro-batches; a separate fully_shard for the module"
    " whose gradients are reduced last (the first one of the model, such as the embedding)",
)
BEGIN = Cause(
    "the graph begins here: no compute can run before this communication is done",
    "a small fully_shard group for what is used first; in backward, reshard_after_forward=False for it",
)
BUSY = Cause(
    "the queue is busy, or the surrounding compute already hides other collectives",
    "more compute on each rank (batch, sequence), or fewer bytes (reshard_after_forward=False, lower precision)",
)
CHAIN = Cause(
    "its input comes from the compute just before it, and the next compute needs its result",
    "independent compute: larger or several micro-batches in a graph; or fewer ranks on this mesh axis",
)
UNFORESEEN = Cause(
    "predicted to be hidden, but it took longer than estimated, or started late because another rank was late",
    "overlapc calibrate --from FILE feeds the measured times back into the profile; give all ranks equal work",
)
SLOWER = Cause("every move that would hide it makes the simulated step longer", BUSY.advice)
OF_ORDER = (  # constraints on the order: without them, another order of the same nodes could hide the communication
    MEMORY,
    BARRIER,
    COLLECTIVE_ORDER,
)

# The first entry that applies is the cause. Causes that an option can change come first, then the two ends of a graph.
_BY_REASON: tuple[tuple[Cause, frozenset[Reason]], ...] = (
    (MEMORY, frozenset({Reason.MEMORY})),
    (BARRIER, frozenset({Reason.BARRIER})),
    (COLLECTIVE_ORDER, frozenset({Reason.COLLECTIVE_ORDER})),
    (END, frozenset({Reason.SCHEDULE_END})),
    (BEGIN, frozenset({Reason.SCHEDULE_START})),
    (
        BUSY,
        frozenset(
            {
                Reason.QUEUE,
                Reason.NEXT_ON_QUEUE,
                Reason.WOULD_EXPOSE,
                Reason.FILLED,
                Reason.REFINED,
                Reason.CUT,
            }
        ),
    ),
    (CHAIN, frozenset({Reason.DATA, Reason.READER, Reason.ORDER_EDGE, Reason.BEFORE})),
    (SLOWER, frozenset({Reason.SLOWER})),
)


@dataclass(frozen=True, slots=True)
class Exposure:
    """The collectives of a graph that are exposed for one cause."""

    cause: Cause
    graph: str
    rows: tuple[CollectiveRow, ...]  # the longest first
    exposed_ns: float  # how long compute stands still for these collectives in a step


def exposures(step: StepRecord, *, measured: bool = False) -> list[Exposure]:
    """Return the exposed communication of a step by graph and cause, longest first, without negligible causes.

    measured: use measured times (see `exposed_is_measured`) instead of predicted ones.
    """
    exposed_for: list[Exposure] = []
    for graph, calls in step.called:
        by_cause: dict[Cause, list[tuple[float, CollectiveRow]]] = {}
        exposed = graph.measured.exposed if measured and graph.measured else None
        for row, cause in _causes(graph):
            ns = row.exposed_after_ns if exposed is None else exposed.get(row.name, 0.0)
            if ns > 0:
                by_cause.setdefault(UNFORESEEN if row.exposed_after_ns < _LITTLE * ns else cause, []).append((ns, row))
        for cause, rows in by_cause.items():
            rows.sort(key=lambda item: -item[0])
            exposed_for.append(
                Exposure(cause, graph.name, tuple(row for _, row in rows), calls * sum(ns for ns, _ in rows))
            )
    least_ns = _LEAST * sum(exposure.exposed_ns for exposure in exposed_for)
    listed = [exposure for exposure in exposed_for if exposure.exposed_ns >= least_ns]
    return sorted(listed, key=lambda exposure: -exposure.exposed_ns)


def exposed_is_measured(step: StepRecord) -> bool:
    """Whether the exposed time of every collective was measured in each graph (older records hold only sums)."""
    measured = [graph.measured for graph, _ in step.called]
    return bool(measured) and all(
        each is not None and each.shows_communication and (each.exposed or not each.exposed_ns) for each in measured
    )


def _causes(graph: GraphRecord) -> Iterator[tuple[CollectiveRow, Cause]]:
    around = _Around(graph)
    beginning = set()  # queues on which all collectives so far have the cause BEGIN
    seen = set()
    for row in graph.collectives:
        cause = cause_of(row)
        if cause is END and around.in_first_half(row):  # its wait moved to the end, with the compute behind it
            cause = cause_of(row, Reason.SCHEDULE_END)
        if cause is SLOWER or not cause.advice:
            cause = around.cause_of(row) or cause
        if cause is END and "reduce" not in row.op:  # only gradients can be accumulated and reduced later
            cause = CHAIN
        behind = row.group in beginning and cause is BUSY and Reason.QUEUE.name in row.causes
        if behind:
            cause = BEGIN
        if row.group not in seen and cause is BEGIN:
            beginning.add(row.group)
        elif not behind:
            beginning.discard(row.group)
        seen.add(row.group)
        yield row, cause


class _Around:
    """Compute time before and after each collective, for collectives whose recorded reasons do not name a cause."""

    def __init__(self, graph: GraphRecord) -> None:
        spans = graph.after.spans
        self.flight = {span.node: span for span in spans if span.lane != "compute"}
        compute = sorted((span for span in spans if span.lane == "compute" and span.kind != "idle"), key=_start)
        self.starts = [span.start_ns for span in compute]
        self.before_ns = [0.0, *itertools.accumulate(span.end_ns - span.start_ns for span in compute)]

    def cause_of(self, row: CollectiveRow) -> Cause | None:
        """Return BEGIN or END if the compute before or after the collective is too short to hide it, else None."""
        if row.name not in self.flight:
            return None
        before_ns, during_ns, after_ns = self._compute_ns(row)
        if before_ns <= _LITTLE * during_ns:
            return BEGIN
        return END if after_ns <= _LITTLE * during_ns else None

    def in_first_half(self, row: CollectiveRow) -> bool:
        """Whether more compute runs after the collective than before it, which means that compute depends on it."""
        if row.name not in self.flight:
            return False
        before_ns, _, after_ns = self._compute_ns(row)
        return before_ns < after_ns

    def _compute_ns(self, row: CollectiveRow) -> tuple[float, float, float]:
        """Return three times: compute before the collective starts, the collective itself, compute after it ends."""
        span = self.flight[row.name]
        before_ns = self.before_ns[bisect.bisect_left(self.starts, span.start_ns)]
        after_ns = self.before_ns[-1] - self.before_ns[bisect.bisect_left(self.starts, span.end_ns)]
        return before_ns, span.end_ns - span.start_ns, after_ns


def _start(span: Span) -> float:
    return span.start_ns


def cause_of(row: CollectiveRow, *ignored: Reason) -> Cause:
    """Return why a collective is exposed, without the reasons `ignored`.

    If no reason of the collective has a Cause, the text of its `limit` is the explanation.
    """
    reasons = {Reason[name] for name in row.causes if name in Reason.__members__}.difference(ignored)
    for cause, covered in _BY_REASON:
        if reasons & covered:
            return cause
    return Cause(row.limit)
