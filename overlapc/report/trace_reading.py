"""What a profiler's trace says about the nodes of compiled graphs.

A trace recorded under `overlapc.report.measure()` holds a mark around every node (runtime/marks.py). On a GPU a
kernel belongs to the mark around its launch, which CUPTI's correlation ids tell. On a CPU the mark itself is the time
of a kernel or call, and a collective is what gloo did next after its mark.
"""

from __future__ import annotations

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
_MOST_BYTES = 2**31  # of a file: torch writes hundreds of megabytes in a few steps


@dataclass(slots=True)
class Marked:
    """One run of one node: its mark on the host, and what it launched on the device or on gloo's threads."""

    label: marks.Label
    host: Interval
    id: int | str | None = None  # the profiler's own, where it gives one
    work: list[Interval] = field(default_factory=list)


@dataclass(frozen=True)
class Trace:
    """The runs of every graph, each a list of marked nodes in the order of their launch."""

    runs: Mapping[str, Sequence[Sequence[Marked]]]
    on_device: bool  # kernels ran behind the host
    rank: int | None = None  # whose trace it is, when it says so


@dataclass(frozen=True, slots=True)
class RunTimes:
    """One run of a graph. Times in ns; communication includes waiting for other ranks."""

    step_ns: float  # from the first thing launched to the end of the last
    compute_ns: float
    comm_ns: float
    exposed_ns: float  # communication beside which no compute ran, because the next kernel waited for it
    idle_ns: float  # nothing ran, or communication beside the gap between two kernels
    late_ns: float  # of the idle time: in which the host had yet to launch the next kernel
    nodes: Mapping[str, float]  # node -> ns, of all that were seen to run
    beside: Mapping[str, float]  # node -> the share of that in which communication (of a collective: compute) ran, too
    stalls: Sequence[Stall] = ()  # the exposed communication, in order

    @property
    def exposed_by(self) -> Mapping[str, float]:
        """Collective -> how long compute stands still for it, in ns."""
        found: dict[str, float] = {}
        for stall in self.stalls:
            start, end = stall.interval
            found[stall.collective] = found.get(stall.collective, 0.0) + end - start
        return found


@dataclass(frozen=True, slots=True)
class Stall:
    """Compute stands still for a collective."""

    collective: str
    interval: Interval


def read_trace(path: str | Path) -> Trace:
    """The marks in a Chrome trace. ConfigError when the file is none, or was recorded without marks."""
    text = documents.read_text(path, _MOST_BYTES)
    data = documents.from_json(text, _File, f"{path} is not a Chrome trace")
    trace = _trace(data.traceEvents, None if data.distributedInfo is None else data.distributedInfo.rank)
    if not trace.runs:
        raise ConfigError(
            f"{path} has no marks of overlapc; record it under overlapc.report.measure(trace=...), "
            "or with `overlapc demo --profile`"
        )
    return trace


_Us = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]


class _Args(msgspec.Struct, frozen=True):
    correlation: int | str | None = None
    id: int | str | None = msgspec.field(default=None, name="External id")


class _Event(msgspec.Struct):
    """What is asked of an event; torch writes more, and some kinds without some of it."""

    ph: str = ""
    name: str = ""
    cat: str = ""
    ts: _Us = 0.0
    dur: Annotated[float, msgspec.Meta(ge=0, le=1e18)] = 0.0
    tid: int | str = 0
    args: _Args = _Args()

    @property
    def interval(self) -> Interval:
        """In ns."""
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
    on_device = _attach_kernels(spans, by_thread)
    if not on_device:
        _attach_host(spans, order)
    return Trace(_runs(order), on_device, rank)


def _attach_kernels(spans: Iterable[_Event], by_thread: Mapping[int | str, list[Marked]]) -> bool:
    """Give each mark the kernels launched within it; whether there were any."""
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
    any_found = False
    for event in spans:
        if event.cat in _DEVICE:
            # Where the trace holds no launches of the driver's API, the id of the mark itself is on the kernel.
            marked = _of(event.args.correlation, launches) or _of(event.args.id, by_id)
            if marked is not None:
                marked.work.append(event.interval)
                any_found = True
    return any_found


def _of(number: int | str | None, marked: Mapping[int | str, Marked]) -> Marked | None:
    return None if number is None else marked.get(number)


def _attach_host(spans: Iterable[_Event], order: Sequence[Marked]) -> None:
    """A CPU's mark is what it ran; a start gets gloo's first events that began after it and belong to no other start.

    gloo begins collectives in the order they were issued, on threads of its own. What the user communicates between
    two starts is passed over: it began before the second.
    """
    gloo = sorted(event.interval for event in spans if event.name.startswith("gloo:"))
    at = 0
    for marked in order:
        if marked.label.how in ("launch", "call"):
            marked.work.append(marked.host)
        elif marked.label.how == "start":
            while at < len(gloo) and gloo[at][0] < marked.host[0]:
                at += 1
            marked.work += gloo[at : at + marked.label.works]
            at += marked.label.works


def _runs(order: Sequence[Marked]) -> dict[str, list[list[Marked]]]:
    """A graph's run ends where one of its nodes comes again."""
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
    """Totals of one run, and each node's own time. collective_of: of starts and waits, the start's name."""
    work = {marked.label.node: merged(marked.work) for marked in run if marked.work}
    # The parts of one collective may run at once; the kernels of one call follow each other.
    flights = {node: each for node, each in work.items() if node in collective_of}
    compute = merged(span for node, each in work.items() if node not in collective_of for span in each)
    comm = merged(span for each in flights.values() for span in each)
    computed, communicated = Covered.by(compute), Covered.by(comm)
    beside = {node: (computed if node in flights else communicated).share(each) for node, each in work.items()}
    busy = merged([*compute, *comm])
    # On a CPU the host is the compute stream, and what it does between the nodes is part of the step.
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
    """Exposed time by what is waited for: by the waits before the next kernel in their order, as far as their
    collectives still run; else (a CPU's host is busy between two kernels) by what is in flight."""
    waited: list[list[str]] = [[]]  # before each kernel, and behind the last
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
            flying = [name for name, each in flights.items() if Covered.by(each).met([(start, end)])]
            yield Stall(flying[0], (start, end))


@dataclass(frozen=True, slots=True)
class _Gap:
    """From the end of a kernel to the begin of the next, for which nothing there had to wait."""

    between: Interval
    late_ns: float  # of it, before the host began to launch that next one


def _gaps(run: Sequence[Marked], collective_of: Mapping[str, str]) -> Iterator[_Gap]:
    """Between kernels of a device's compute stream, in the order of their launches."""
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
    """The median of each time over several runs of a graph."""
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
    """The same points in time as ascending intervals that do not touch."""
    result: list[Interval] = []
    for start, end in sorted(intervals):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


@dataclass(frozen=True)
class Covered:
    """Points in time: ascending intervals that do not touch."""

    intervals: Sequence[Interval]
    starts: Sequence[float]

    @classmethod
    def by(cls, intervals: Sequence[Interval]) -> Covered:
        """`intervals` as `merged` makes them."""
        return cls(intervals, [start for start, _ in intervals])

    def share(self, others: Sequence[Interval]) -> float:
        """The part of `others`, which do not overlap each other, that is covered."""
        asked = length(others)
        return self.met(others) / asked if asked else 0.0

    def met(self, others: Iterable[Interval]) -> float:
        """How much of `others`, which do not overlap each other, is covered, in ns."""
        met = 0.0
        for start, end in others:
            for at in range(max(0, bisect_right(self.starts, start) - 1), bisect_right(self.starts, end)):
                met += max(0.0, min(end, self.intervals[at][1]) - max(start, self.starts[at]))
        return met


def without(intervals: Iterable[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of `intervals` is in none of `others`; both as `merged` makes them."""
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
    """Their lengths together."""
    return sum(end - start for start, end in intervals)
