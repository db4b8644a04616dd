"""The predicted step as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

One process a rank, one thread a resource and order, an arrow from each collective to the moment compute
stops waiting for it, and a counter of live memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from overlapc.report.model import GraphRecord, Plan, Span, StepRecord
from overlapc.report.page_data import lanes_of

_PAUSE_NS = 10_000.0  # between two graphs drawn one after the other

Event = dict[str, Any]


def render(steps: Sequence[StepRecord]) -> str:
    """The text of a trace.json: graphs of a step follow one another, in the order of compilation."""
    events = [event for step in steps for event in _step(step)]
    return json.dumps({"displayTimeUnit": "ns", "traceEvents": events}) + "\n"


def _step(step: StepRecord) -> Iterator[Event]:
    yield _meta(step.rank, 0, "process_name", f"rank {step.rank}")
    threads: dict[str, int] = {}
    start_ns = 0.0
    for number, graph in enumerate(step.graphs):
        for label, plan in (("after", graph.after), ("before", graph.before)):
            yield from _tracks(step.rank, threads, label, plan, start_ns, graph)
            yield from _arrows(step.rank, threads, label, plan, start_ns, f"{step.rank}.{number}.{label}")
        for time_ns, size_bytes in graph.memory:
            yield {
                "ph": "C",
                "pid": step.rank,
                "name": "live memory",
                "ts": (start_ns + time_ns) / 1e3,
                "args": {"bytes": size_bytes},
            }
        start_ns += max(graph.before.step_ns, graph.after.step_ns) + _PAUSE_NS


def _tracks(
    rank: int, threads: dict[str, int], label: str, plan: Plan, start_ns: float, graph: GraphRecord
) -> Iterator[Event]:
    """What ran on each resource; one that is met for the first time gets a number in `threads`."""
    for lane in lanes_of(plan.spans):
        track = lane if label == "after" else f"{lane} (before the passes)"
        if track not in threads:
            threads[track] = len(threads) + 1
            yield _meta(rank, threads[track], "thread_name", track)
            yield _meta(rank, threads[track], "thread_sort_index", threads[track])
        on_lane = (span for span in plan.spans if span.lane == lane)
        yield from (_slice(rank, threads[track], span, start_ns, graph) for span in on_lane)


def _meta(pid: int, tid: int, name: str, value: str | int) -> Event:
    key = "sort_index" if name.endswith("sort_index") else "name"
    return {"ph": "M", "pid": pid, "tid": tid, "name": name, "args": {key: value}}


def _slice(pid: int, tid: int, span: Span, offset_ns: float, graph: GraphRecord) -> Event:
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": f"waits for {span.node}" if span.kind == "idle" else span.node,
        "cat": span.kind,
        "ts": (offset_ns + span.start_ns) / 1e3,  # the format counts microseconds
        "dur": (span.end_ns - span.start_ns) / 1e3,
        "args": {"graph": graph.name, "origin": span.origin},
    }


def _arrows(
    pid: int, threads: dict[str, int], label: str, plan: Plan, offset_ns: float, prefix: str
) -> Iterator[Event]:
    """From the start of each collective to the moment compute goes on behind its wait."""
    flying = {span.node: span for span in plan.spans if span.lane != "compute"}
    for span in plan.spans:
        source = flying.get(span.node)
        if span.kind != "idle" or source is None:
            continue
        suffix = "" if label == "after" else " (before the passes)"
        common = {"pid": pid, "cat": "wait", "name": f"{span.node} done", "id": f"{prefix}.{span.node}"}
        lane = threads[source.lane + suffix]
        yield {**common, "ph": "s", "tid": lane, "ts": (offset_ns + source.start_ns) / 1e3}
        yield {
            **common,
            "ph": "f",
            "bp": "e",
            "tid": threads["compute" + suffix],
            "ts": (offset_ns + span.end_ns) / 1e3,
        }
