"""Measured times of an earlier run, for `estimates=FILE`: a record that was measured, or a profiler's trace."""

from __future__ import annotations

import functools
from pathlib import Path
from statistics import median

from overlapc.errors import ConfigError
from overlapc.estimators.user_times import EarlierRun, Hook, UserHook, signature_of
from overlapc.report.model import GraphRecord
from overlapc.report.parsed_schedules import schedule_of
from overlapc.report.record import load
from overlapc.report.trace_reading import read_trace, run_times

MeasuredTimes = dict[tuple[str, str], tuple[str, float]]  # (graph, node) -> signature or "", ns


def users_estimator(estimates: str | Hook | None, graph: str) -> UserHook | EarlierRun | None:
    """Return the estimator that the user gave for `graph`, which is asked first; None without `estimates`.

    Raise ConfigError as `earlier_run` does.
    """
    if estimates is None:
        return None
    return UserHook(estimates) if callable(estimates) else earlier_run(estimates, graph)


def earlier_run(file: str, graph: str) -> EarlierRun:
    """Return an estimator for `graph` from a file. Raise ConfigError if the file holds no measurement by overlapc.

    A record holds each node's signature and the slowdown that the simulator predicted for contention. That slowdown is
    divided out of the measured times, because the simulator will apply it again. A trace has only the names of nodes,
    so its times are used unchanged.
    """
    path = Path(file)
    try:
        changed = path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"estimates: cannot read {path}: {error.strerror}") from None
    return EarlierRun.of(graph, _read(path, changed), f"measured {path.name}")


@functools.lru_cache(maxsize=4)
def _read(path: Path, _changed: int) -> MeasuredTimes:
    try:
        with path.open("rb") as file:
            head = file.read(64)
    except OSError as error:
        raise ConfigError(f"estimates: cannot read {path}: {error.strerror}") from None
    if b"overlapc_record" not in head:
        return _from_trace(path)
    graphs = [graph for step in load(path).steps for graph in step.graphs if graph.measured is not None]
    if not graphs:
        raise ConfigError(f"estimates: {path} has no measured times; use a record of `overlapc demo --profile`")
    return {key: entry for graph in reversed(graphs) for key, entry in _from_record(graph).items()}


def _from_record(graph: GraphRecord) -> MeasuredTimes:
    assert graph.measured is not None
    spans = {span.node: span.end_ns - span.start_ns for span in graph.after.spans if span.kind != "idle"}
    times: MeasuredTimes = {}
    for node in schedule_of(graph).nodes:
        ns = graph.measured.nodes.get(node.name)
        if ns is None:
            continue
        slowed_ns = spans.get(node.name, 0.0)
        if node.estimate is not None and slowed_ns > node.estimate.ns > 0:
            ns *= node.estimate.ns / slowed_ns
        times[graph.name, node.name] = (signature_of(node), ns)
    return times


def _from_trace(path: Path) -> MeasuredTimes:
    trace = read_trace(path)
    samples: dict[tuple[str, str], list[float]] = {}
    for graph, runs in trace.runs.items():
        for run in runs:
            for node, ns in run_times(run, {}, trace.on_device).nodes.items():
                samples.setdefault((graph, node), []).append(ns)
    return {key: ("", median(times)) for key, times in samples.items()}
