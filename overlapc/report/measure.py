"""Measures steps of a training job and adds the measured times to the report.

    with overlapc.report.measure() as measured:
        for _ in range(3):
            step(tokens, targets).backward()
    print(measured.report)

All ranks must measure the same steps. Inside the block, graphs run with profiler marks around their nodes, so run the
first steps, which compile, before the block. A GPU needs some tenths of a second until its clock settles at what its
power limit allows: to get the times of a long job, measure more steps and count only the `last` of them.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import TracebackType

import torch
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from overlapc.errors import ConfigError
from overlapc.report import record
from overlapc.report.graph_record import shown_origin
from overlapc.report.model import GraphRecord, Measured, Span
from overlapc.report.parsed_schedules import schedule_of
from overlapc.report.record import NothingCompiled, Report
from overlapc.report.trace_reading import Marked, NoMarks, Stall, Trace, merged, read_trace, run_times, typical
from overlapc.runtime.copies.pool import pools_bytes
from overlapc.runtime.marks import marked
from overlapc.schedule.model import COMMUNICATION, Schedule


class Measurement:
    """The context manager of `measure()`. On exit, `report` and `overlapc.report()` have the measured times."""

    def __init__(self, trace: str | os.PathLike[str] | None = None, last: int = 0) -> None:
        self._trace = None if trace is None else Path(trace)
        self._last = last
        self._stack = contextlib.ExitStack()
        self.report: Report | None = None

    def __enter__(self) -> Measurement:
        self._cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        activities = [ProfilerActivity.CPU]
        if self._cuda:
            activities.append(ProfilerActivity.CUDA)
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        # On CPUs a thread of their own runs copies; on GPUs a profiler sees all threads' work on the device anyway.
        every_thread = _ExperimentalConfig(profile_all_threads=not self._cuda)
        profiler = profile(activities=activities, experimental_config=every_thread)
        self._profile = self._stack.enter_context(profiler)
        self._stack.enter_context(marked())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._cuda and error is None:
            torch.cuda.synchronize()
        peak_bytes = torch.cuda.max_memory_allocated() + pools_bytes() if self._cuda else None
        self._stack.close()
        if error is not None:
            return
        with tempfile.TemporaryDirectory() as folder:
            path = self._trace or Path(folder) / "trace.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(path))
            try:
                trace = read_trace(path)
            except NoMarks:
                raise NothingCompiled(
                    "nothing compiled with backend='overlapc' ran while measuring; put whole steps into the block"
                ) from None
        (step,) = record.report_of_process().steps
        graphs = tuple(with_trace(graph, trace, self._last) for graph in step.graphs)
        self.report = Report((replace(step, graphs=graphs, measured_peak_bytes=peak_bytes),))
        record.add_measured(self.report)


def measure(trace: str | os.PathLike[str] | None = None, *, last: int = 0) -> Measurement:
    """Profile the steps in a `with` block.

    trace: file for the profiler's Chrome trace, which is large (*.json.gz: compressed); None: the trace is deleted.
    last: number of runs of each graph that count, from the end; 0: all.
    Raise NothingCompiled if no compiled graph ran in the block.
    """
    return Measurement(trace, last)


def with_trace(graph: GraphRecord, trace: Trace, last: int = 0) -> GraphRecord:
    """Return `graph` with the times of its `last` runs (0: all) in the trace; `graph` itself if it has none.

    Every program has a `forward_0`: runs with a node that `graph` lacks are those of another program's graph.
    """
    schedule = schedule_of(graph)
    nodes = schedule.positions.keys()
    runs = [run for run in trace.runs.get(graph.name, ()) if all(marked.label.node in nodes for marked in run)][-last:]
    if not runs:
        return graph
    collective_of = {node.name: node.name for node in schedule.nodes if node.kind in COMMUNICATION}
    collective_of |= {wait.name: schedule.start_of(wait).name for wait in schedule.waits()}
    each = [run_times(run, collective_of, trace.on_device) for run in runs]
    times = typical(each)
    by_run = [run.exposed_by for run in each]
    exposed = {name: median(run.get(name, 0.0) for run in by_run) for name in dict.fromkeys(itertools.chain(*by_run))}
    nearest = min(range(len(runs)), key=lambda at: abs(each[at].step_ns - times.step_ns))
    measured = Measured(
        len(runs), times.step_ns, times.compute_ns, times.comm_ns, times.exposed_ns, times.idle_ns, times.nodes,
        times.beside, times.late_ns, tuple(_spans(runs[nearest], each[nearest].stalls, schedule)), exposed,
        times.nodes.keys() >= set(collective_of.values()),
    )  # fmt: skip
    return replace(graph, measured=measured)


def _spans(run: Sequence[Marked], stalls: Sequence[Stall], schedule: Schedule) -> Iterator[Span]:
    """Yield the work and the stalls of a run on the lanes of the simulator; time 0 is the start of the first work."""
    begin_ns = min((start for each in run for start, _ in each.work), default=0.0)
    for each in run:
        if each.work:
            name = each.label.node
            node = schedule.node(name)
            lane = f"@{node.queue or 'unknown'}" if node.kind in COMMUNICATION else "compute"
            for start, end in merged(each.work):
                yield Span(name, lane, start - begin_ns, end - begin_ns, node.kind.value, shown_origin(node.origin))
    for stall in stalls:
        start, end = (at_ns - begin_ns for at_ns in stall.interval)
        yield Span(
            stall.collective, "compute", start, end, "idle", shown_origin(schedule.node(stall.collective).origin)
        )


def report_with_trace(report: Report, path: str | os.PathLike[str]) -> Report:
    """Return `report` with the measured times of a trace file, for the rank that the trace names, else for the first.

    That rank becomes the first of the report. Raise ConfigError if the file is not a trace, has none of the report's
    graphs, or names a rank that the report lacks.
    """
    trace = read_trace(Path(path))
    ranks = [step.rank for step in report.steps]
    if trace.rank is not None and trace.rank not in ranks:
        raise ConfigError(
            f"{path} is a trace of rank {trace.rank}, but the record has only rank {', '.join(map(str, ranks))}; take"
            " both from the same rank"
        )
    at = 0 if trace.rank is None else ranks.index(trace.rank)
    steps = list(report.steps)
    steps[at] = replace(steps[at], graphs=tuple(with_trace(graph, trace) for graph in steps[at].graphs))
    if not any(graph.measured for graph in steps[at].graphs):
        raise ConfigError(
            f"{path} holds other graphs ({', '.join(trace.runs)}) than the record "
            f"({', '.join(graph.name for graph in steps[at].graphs)}); take both from the same run"
        )
    steps.insert(0, steps.pop(at))  # the first rank is the one that reports show
    return Report(tuple(steps))
