"""The trace has the shape that Perfetto reads, and the plan's own times."""

from __future__ import annotations

import json

import pytest

from overlapc.report import trace
from tests.report.sample import AFTER, FORWARD, REPORT


@pytest.fixture(scope="module")
def events():
    return json.loads(trace.render(REPORT.steps))["traceEvents"]


def test_one_process_a_rank_and_one_named_thread_a_resource_and_order(events):
    names = {(event["pid"], event["args"]["name"]) for event in events if event["name"] == "thread_name"}
    lanes = {"compute", "@dp", "compute (before the passes)", "@dp (before the passes)"}
    assert names == {(rank, lane) for rank in (0, 1) for lane in lanes}
    assert {event["pid"] for event in events if event["name"] == "process_name"} == {0, 1}


def test_slices_last_as_long_as_planned_and_never_overlap_on_a_track(events):
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 2 * 12 + 12  # two graphs on rank 0, one on rank 1, each before and after
    track: dict[tuple[int, int], float] = {}
    for event in slices:
        assert event["dur"] >= 0
    for event in sorted(slices, key=lambda event: event["ts"]):
        where = (event["pid"], event["tid"])
        assert event["ts"] >= track.get(where, 0.0)
        track[where] = event["ts"] + event["dur"]
    mm1 = next(event for event in slices if event["name"] == "mm1" and event["pid"] == 1)
    planned = next(span for span in AFTER.spans if span.node == "mm1")
    assert (mm1["ts"], mm1["dur"]) == (planned.start_ns / 1e3, (planned.end_ns - planned.start_ns) / 1e3)


def test_graphs_follow_one_another(events):
    of_rank = [event for event in events if event["ph"] == "X" and event["pid"] == 0]
    forward = [event for event in of_rank if event["args"]["graph"] == "forward"]
    backward = [event for event in of_rank if event["args"]["graph"] == "backward"]
    assert max(event["ts"] + event["dur"] for event in forward) < min(event["ts"] for event in backward)


def test_an_arrow_leads_from_each_collective_to_the_end_of_its_wait(events):
    starts = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == 2 * 3 * len(FORWARD.collectives)  # before and after, of three graphs
    arrow = "1.0.after.ag1"
    assert (starts[arrow]["ts"], ends[arrow]["ts"]) == (100.0, 200.0)


def test_memory_is_a_counter_in_bytes(events):
    counters = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == 1]
    assert counters == [size for _, size in FORWARD.memory]
