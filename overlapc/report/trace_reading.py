"""Reads the times of the nodes of compiled graphs from a profiler's trace.

A trace recorded under `overlapc.report.measure()` has a mark around every node (runtime/marks.py). On a GPU a kernel
belongs to the mark around its launch, found by CUPTI's correlation ids. On a CPU the mark is the time of a kernel or
call, and a collective is the next work of gloo after its mark. Copies between ranks are counted off: each group runs
them in order on a stream, or thread, of its own.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated

import msgspec

from overlapc import documents
from overlapc.errors import ConfigError
from overlapc.runtime import marks

Interval = tuple[float, float]  # ns
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_BETWEEN_GPUS = "Memcpy PtoP"  # the profiler's name of a copy from one GPU to another
_MOST_BYTES = 2**31  # limit of a file's size; torch writes hundreds of megabytes for a few steps


@dataclass(slots=True)
class Marked:
    """One run of one node: its mark on the host, and the work that it launched on the device or on gloo's threads."""

    label: marks.Label
    host: Interval
    id: int | str | None = None  # the profiler's id of the mark, if it gives one
    work: list[Interval] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """The runs of every graph, each a list of marked nodes in the order of their launch."""

    runs: Mapping[str, Sequence[Sequence[Marked]]]
    on_device: bool  # kernels ran on a device, asynchronously to the host
    rank: int | None = None  # the rank that recorded the trace, if the trace says so


@dataclass(frozen=True, slots=True)
class RunTimes:
    """Times of one run of a graph, in ns. Communication includes waiting for other ranks."""

    step_ns: float  # from the start of the first launched work to the end of the last
    compute_ns: float
    comm_ns: float
    exposed_ns: float  # communication that no compute overlapped, because the next kernel waited for it
    idle_ns: float  # gaps between kernels that wait for no communication
    late_ns: float  # the part of idle_ns in which the host had not launched the next kernel yet
    nodes: Mapping[str, float]  # node -> ns, for all nodes that the trace shows
    beside: Mapping[str, float]  # node -> fraction of that in which communication (for a collective: compute) ran, too
    stalls: Sequence[Stall] = ()  # the exposed communication, in order

    @property
    def exposed_by(self) -> Mapping[str, float]:
        """Collective -> time that compute waits for it, in ns."""
        found: dict[str, float] = {}
        for stall in self.stalls:
            start, end = stall.interval
            found[stall.collective] = found.get(stall.collective, 0.0) + end - start
        return found


@dataclass(frozen=True, slots=True)
class Stall:
    """An interval in which compute waits for a collective."""

    collective: str
    interval: Interval


class NoMarks(ConfigError):
    """A trace in which no compiled graph runs, or that was recorded without marks."""


def read_trace(path: str | Path) -> Trace:
    """Read the marks in a Chrome trace. Raise ConfigError if the file is not one, NoMarks if it has none."""
    text = documents.read_text(path, _MOST_BYTES)
    data = documents.from_json(text, _File, f"{path} is not a Chrome trace")
    trace = _trace(data.traceEvents, None if data.distributedInfo is None else data.distributedInfo.rank)
    if not trace.runs:
        raise NoMarks(
            f"{path} has no marks of overlapc; record it under overlapc.report.measure(trace=...), "
            "or with `overlapc demo --profile`"
        )
    return trace


_Us = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]


class _Args(msgspec.Struct, frozen=True):
    correlation: int | str | None = None
    id: int | str | None = msgspec.field(default=None, name="External id")


class _Event(msgspec.Struct):
    """The fields of an event that are read here. Torch writes more fields, and not all of these for every kind."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: _Us = 0.0
    dur: Annotated[float, msgspec.Meta(ge=0, le=1e18)] = 0.0
    tid: int | str = 0
    args: _Args = _Args()

    @property
    def interval(self) -> Interval:
        """Start and end in ns."""
        return self.ts * 1e3, (self.ts + self.dur) * 1e3


class _Distributed(msgspec.Struct):
    rank: int | None = None


class _File(msgspec.Struct):
    traceEvents: list[_Event]
    distributedInfo: _Distributed | None = None


def _trace(events: Sequence[_Event], rank: int | None) -> Trace:
    spans = [event for event in events if event.ph == "X"]
    by_thread: dict[int | str, list[Marked]] = {}
    order: list[Marked] = []
    for event in sorted(spans, key=lambda event: event.ts):
        label = marks.Label.parse(event.name) if event.cat == "user_annotation" else None
        if label is not None:
            marked = Marked(label, event.interval, event.args.id)
            by_thread.setdefault(event.tid, []).append(marked)
            order.append(marked)
    on_device, others = _attach_kernels(spans, by_thread)
    if not on_device:
        _attach_host(spans, order)
    _attach_copies(spans, others, order)
    return Trace(_runs(order), on_device, rank)


def _attach_kernels(
    spans: Iterable[_Event], by_thread: Mapping[int | str, list[Marked]]
) -> tuple[bool, Sequence[_Event]]:
    """Add to each mark the kernels launched within it; return whether there were any, and those outside of marks."""
    launches: dict[int | str, Marked] = {}
    by_id = {marked.id: marked for each in by_thread.values() for marked in each if marked.id is not None}
    starts = {thread: [marked.host[0] for marked in each] for thread, each in by_thread.items()}
    for event in spans:
        correlation = event.args.correlation
        if event.cat not in _LAUNCHES or event.tid not in starts or correlation is None:
            continue
        at_ns = event.ts * 1e3
        at = bisect_right(starts[event.tid], at_ns) - 1
        if at >= 0 and at_ns <= by_thread[event.tid][at].host[1]:
            launches[correlation] = by_thread[event.tid][at]
    any_found, others = False, []
    for event in spans:
        if event.cat in _DEVICE:
            # If the trace has no launches of the driver's API, the kernel has the id of the mark itself.
            marked = _of(event.args.correlation, launches) or _of(event.args.id, by_id)
            if marked is not None:
                marked.work.append(event.interval)
                any_found = True
            else:
                others.append(event)
    return any_found, others


def _attach_copies(spans: Iterable[_Event], on_device: Iterable[_Event], order: Sequence[Marked]) -> None:
    """Add to each start of a collective by copies the next copies of its queue.

    On a GPU a trace does not say which queue a stream belongs to: that with as many copies as the queue's starts have.
    Where no stream has, or several have, the queue's collectives get no times.
    """
    starts: dict[str, list[Marked]] = {}
    for marked in order:
        if marked.label.queue and not marked.work:
            starts.setdefault(marked.label.queue, []).append(marked)
    by_thread: dict[str, list[Interval]] = {}
    for event in spans:
        queue = marks.copied_by(event.name)
        if queue is not None:
            by_thread.setdefault(queue, []).append(event.interval)
    by_stream: dict[int | str, list[Interval]] = {}
    for event in on_device:
        if event.name.startswith(_BETWEEN_GPUS):
            by_stream.setdefault(event.tid, []).append(event.interval)
    wanted = {queue: sum(marked.label.works for marked in each) for queue, each in starts.items()}
    for queue, each in starts.items():
        streams = [found for found in by_stream.values() if len(found) == wanted[queue]]
        found = by_thread.get(queue) or (streams[0] if len(streams) == 1 else [])
        if len(found) != wanted[queue] or (streams and list(wanted.values()).count(wanted[queue]) > 1):
            continue
        copies = iter(sorted(found))
        for marked in each:
            marked.work += itertools.islice(copies, marked.label.works)


def _of(number: int | str | None, marked: Mapping[int | str, Marked]) -> Marked | None:
    return None if number is None else marked.get(number)


def _attach_host(spans: Iterable[_Event], order: Sequence[Marked]) -> None:
    """Add work to the marks of a CPU: a kernel or call gets its mark's time, a start gloo's next unassigned events.

    gloo begins collectives in the order in which they were issued, on its own threads. Communication that the user
    issues between two starts is skipped, because it begins before the second start.
    """
    gloo = sorted(event.interval for event in spans if event.name.startswith("gloo:"))
    at = 0
    for marked in order:
        if marked.label.how in ("launch", "call"):
            marked.work.append(marked.host)
        elif marked.label.how == "start" and not marked.label.queue:
            while at < len(gloo) and gloo[at][0] < marked.host[0]:
                at += 1
            marked.work += gloo[at : at + marked.label.works]
            at += marked.label.works


def _runs(order: Sequence[Marked]) -> dict[str, list[list[Marked]]]:
    """Divide the marks of each graph into runs: a new run begins when a node occurs again."""
    runs: dict[str, list[list[Marked]]] = {}
    seen: dict[str, set[str]] = {}
    for marked in order:
        graph, node = marked.label.graph, marked.label.node
        if graph not in runs or node in seen[graph]:
            runs.setdefault(graph, []).append([])
            seen[graph] = set()
        seen[graph].add(node)
        runs[graph][-1].append(marked)
    return runs


def run_times(run: Sequence[Marked], collective_of: Mapping[str, str], on_device: bool) -> RunTimes:
    """Return the totals of one run and the time of each node.

    collective_of: name of a start, or of a wait -> name of the start.
    """
    work = {marked.label.node: merged(marked.work) for marked in run if marked.work}
    # Intervals are merged because the parts of one collective may run concurrently.
    flights = {node: each for node, each in work.items() if node in collective_of}
    compute = merged(span for node, each in work.items() if node not in collective_of for span in each)
    for node, waited in _waits_for_peers(run, collective_of) if on_device else ():
        flights[node] = merged([*flights[node], waited])
    comm = merged(span for each in flights.values() for span in each)
    computed, communicated = Covered.by(compute), Covered.by(comm)
    beside = {node: (computed if node in flights else communicated).share(each) for node, each in work.items()}
    busy = merged([*compute, *comm])
    # On a CPU the host is the compute stream, and its work between the nodes is part of the step.
    bounds = busy if on_device else merged([*busy, *(marked.host for marked in run)])
    step_ns = bounds[-1][1] - bounds[0][0] if bounds else 0.0
    gaps = list(_gaps(run, collective_of)) if on_device else []
    exposed = without(comm, merged([*compute, *(gap.between for gap in gaps)]))
    exposed_ns = length(exposed)
    return RunTimes(
        step_ns, length(compute), length(comm), exposed_ns, step_ns - length(compute) - exposed_ns,
        sum(gap.late_ns for gap in gaps), {node: length(each) for node, each in work.items()}, beside,
        tuple(_stalls(run, collective_of, flights, exposed)),
    )  # fmt: skip


def _stalls(
    run: Sequence[Marked],
    collective_of: Mapping[str, str],
    flights: Mapping[str, Sequence[Interval]],
    exposed: Sequence[Interval],
) -> Iterator[Stall]:
    """Attribute the exposed time to collectives.

    Each interval goes to the collectives of the waits before the next kernel, in their order, as long as each of them
    runs. Any remaining part (on a CPU, where the host is busy between two kernels) goes to a collective in flight.
    """
    waited: list[list[str]] = [[]]  # collectives waited for before each kernel, and after the last one
    begins: list[float] = []  # of kernels
    for marked in run:
        collective = collective_of.get(marked.label.node)
        if collective is None and marked.work:
            begins.append(min(start for start, _ in marked.work))
            waited.append([])
        elif collective is not None and marked.label.how != "start":
            waited[-1].append(collective)
    for start, end in exposed:
        for collective in waited[bisect_right(begins, start)]:
            until = min(end, flights[collective][-1][1]) if collective in flights else start
            if until > start:
                yield Stall(collective, (start, until))
                start = until
        if start < end:
            in_flight = [name for name, each in flights.items() if Covered.by(each).overlap_ns([(start, end)])]
            yield Stall(in_flight[0], (start, end))


def _waits_for_peers(run: Sequence[Marked], collective_of: Mapping[str, str]) -> Iterator[tuple[str, Interval]]:
    """Yield each gap between kernels in which compute waits for a collective by copies, and that collective.

    Other ranks send what it waits for, and this rank's trace does not show their copies.
    """
    copied = {marked.label.node for marked in run if marked.label.queue and marked.work}
    end, awaited = math.inf, ""
    for marked in run:
        collective = collective_of.get(marked.label.node)
        if marked.label.how == "wait" and collective in copied:
            awaited = collective or ""
        if collective is not None:
            continue
        for begin, until in merged(marked.work):
            start = max(end, marked.host[0])
            if awaited and begin > start:
                yield awaited, (start, begin)
            end, awaited = until, ""


@dataclass(frozen=True, slots=True)
class _Gap:
    """The time between two kernels if the second one did not wait for communication."""

    between: Interval
    late_ns: float  # the part before the host began to launch the second kernel


def _gaps(run: Sequence[Marked], collective_of: Mapping[str, str]) -> Iterator[_Gap]:
    """Yield the gaps between kernels of a device's compute stream, in launch order."""
    end, waited = math.inf, False
    for marked in run:
        if marked.label.how == "start":
            continue
        if marked.label.how == "wait" or marked.label.node in collective_of:
            waited = True
            continue
        for number, (begin, until) in enumerate(merged(marked.work)):
            if begin > end and not (waited and number == 0):
                late_ns = max(0.0, min(begin, marked.host[0]) - end) if number == 0 else 0.0
                yield _Gap((end, begin), late_ns)
            end, waited = until, False


def typical(runs: Sequence[RunTimes]) -> RunTimes:
    """Return the median of each time over several runs of a graph."""
    names = dict.fromkeys(name for run in runs for name in run.nodes)
    return RunTimes(
        step_ns=median(run.step_ns for run in runs),
        compute_ns=median(run.compute_ns for run in runs),
        comm_ns=median(run.comm_ns for run in runs),
        exposed_ns=median(run.exposed_ns for run in runs),
        idle_ns=median(run.idle_ns for run in runs),
        late_ns=median(run.late_ns for run in runs),
        nodes={name: median(run.nodes[name] for run in runs if name in run.nodes) for name in names},
        beside={name: median(run.beside[name] for run in runs if name in run.beside) for name in names},
    )


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as ascending intervals that do not touch."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


@dataclass(frozen=True)
class Covered:
    """A set of ascending intervals that do not touch, for fast queries of the overlap with other intervals."""

    intervals: Sequence[Interval]
    starts: Sequence[float]

    @classmethod
    def by(cls, intervals: Sequence[Interval]) -> Covered:
        """Build from intervals as `merged` returns them."""
        return cls(intervals, [start for start, _ in intervals])

    def share(self, others: Sequence[Interval]) -> float:
        """Return the fraction of `others`, which must not overlap each other, that is covered."""
        total_ns = length(others)
        return self.overlap_ns(others) / total_ns if total_ns else 0.0

    def overlap_ns(self, others: Iterable[Interval]) -> float:
        """Return how much of `others`, which must not overlap each other, is covered, in ns."""
        overlap_ns = 0.0
        for start, end in others:
            for at in range(max(0, bisect_right(self.starts, start) - 1), bisect_right(self.starts, end)):
                overlap_ns += max(0.0, min(end, self.intervals[at][1]) - max(start, self.starts[at]))
        return overlap_ns


def without(intervals: Iterable[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return `intervals` minus `others`; both must be as `merged` returns them."""
    left = []
    starts = [start for start, _ in others]
    for start, end in intervals:
        for other_start, other_end in others[max(0, bisect_right(starts, start) - 1) :]:
            if other_start >= end:
                break
            if other_start > start:
                left.append((start, other_start))
            start = max(start, other_end)
        if start < end:
            left.append((start, end))
    return left


def length(intervals: Iterable[Interval]) -> float:
    """Return the total length of the intervals."""
    return sum(end - start for start, end in intervals)
