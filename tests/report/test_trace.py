"""The trace file as read by Perfetto's library: tracks by rank and order, the plan's times, arrows, memory."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from overlapc.errors import ConfigError
from overlapc.report.model import Plan, Span
from overlapc.report.record import Report
from overlapc.report.trace import levels
from tests.report.sample import AFTER, BACKWARD, FORWARD, REPORT

perfetto_trace_pb2 = pytest.importorskip("perfetto.protos.perfetto.trace.perfetto_trace_pb2")
EVENT = perfetto_trace_pb2.TrackEvent


class Read:
    """A trace read back from a file: slices and counters by the path of their track."""

    def __init__(self, content: bytes) -> None:
        packets = perfetto_trace_pb2.Trace.FromString(content).packet
        tracks = {each.track_descriptor.uuid: each.track_descriptor for each in packets if each.track_descriptor.uuid}
        self.tracks = tracks
        self.slices: dict[str, list[tuple[int, int, str]]] = {}
        self.counters: dict[str, list[int]] = {}
        self.events = [each for each in packets if each.HasField("track_event")]
        open_slices: dict[int, list[tuple[int, str]]] = {}
        for packet in self.events:
            event = packet.track_event
            path = self.path(event.track_uuid)
            if event.type == EVENT.TYPE_SLICE_BEGIN:
                open_slices.setdefault(event.track_uuid, []).append((packet.timestamp, event.name))
            elif event.type == EVENT.TYPE_SLICE_END:
                begin, name = open_slices[event.track_uuid].pop()
                self.slices.setdefault(path, []).append((begin, packet.timestamp, name))
            else:
                self.counters.setdefault(path, []).append(event.counter_value)
        assert not any(open_slices.values())

    def path(self, uuid: int) -> str:
        track = self.tracks[uuid]
        return (self.path(track.parent_uuid) + "/" if track.parent_uuid else "") + track.name


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    return Read(REPORT.save(tmp_path_factory.mktemp("trace") / "trace.pftrace").read_bytes())


def test_a_track_for_each_rank_order_and_resource(read):
    orders = ("before the passes", "after the passes")
    lanes = {f"rank {rank}/{order}/{lane}" for rank in (0, 1) for order in orders for lane in ("compute", "@dp")}
    graphs = {f"rank {rank}/{order}/graphs" for rank in (0, 1) for order in orders}
    assert set(read.slices) == lanes | graphs


def test_slices_last_as_long_as_planned(read):
    planned = sorted(
        (round(span.start_ns), round(span.end_ns), f"waits for {span.node}" if span.kind == "idle" else span.node)
        for span in AFTER.spans
    )
    found = read.slices["rank 1/after the passes/compute"] + read.slices["rank 1/after the passes/@dp"]
    assert sorted(found) == planned


def test_graphs_follow_one_another(read):
    graphs = read.slices["rank 0/after the passes/graphs"]
    assert graphs == [(0, 280_000, "forward"), (280_000, 560_000, "backward")]
    assert max(end for _, end, _ in read.slices["rank 0/after the passes/compute"]) == 560_000


def test_an_arrow_leads_from_each_collective_to_its_wait(read):
    leaves = {flow: each for each in read.events for flow in each.track_event.flow_ids}
    arrives = {flow: each for each in read.events for flow in each.track_event.terminating_flow_ids}
    assert leaves.keys() == arrives.keys()
    assert len(leaves) == 2 * 3 * len(FORWARD.collectives)  # two orders of three graphs
    for flow, begin in leaves.items():
        end = arrives[flow]
        assert end.track_event.name == f"waits for {begin.track_event.name}"
        assert begin.timestamp <= end.timestamp
        assert read.events.index(begin) < read.events.index(end)  # Perfetto keeps the file's order of equal times


def test_memory_is_a_counter_in_bytes(read):
    assert read.counters["rank 1/after the passes/live memory"] == [size for _, size in FORWARD.memory]
    (unit,) = {track.counter.unit for track in read.tracks.values() if track.name == "live memory"}
    assert unit == perfetto_trace_pb2.CounterDescriptor.UNIT_SIZE_BYTES


def test_a_click_shows_what_the_page_shows(read):
    (gather,) = [
        each.track_event
        for each in read.events
        if each.track_event.name == "ag1" and read.path(each.track_event.track_uuid) == "rank 1/after the passes/@dp"
    ]
    facts = {each.name: each.string_value for each in gather.debug_annotations}
    assert facts["limit"] == "peak memory"
    assert facts["of"] == "layers.1"


def test_collectives_that_overlap_get_rows_of_one_name(tmp_path):
    flights = (Span("a", "@dp", 0, 30, "start"), Span("b", "@dp", 10, 20, "start"), Span("c", "@dp", 15, 40, "start"))
    graph = replace(FORWARD, before=Plan(40), after=Plan(40, (*flights, Span("d", "@dp", 30, 50, "start"))))
    step = replace(REPORT.steps[0], graphs=(graph, BACKWARD))
    found = Read(Report((step,)).save(tmp_path / "trace.pftrace").read_bytes())
    rows = [each for each in found.tracks.values() if found.path(each.uuid) == "rank 0/after the passes/@dp"]
    assert len(rows) == 3
    bars = [[0, 0, 0, 30, "a"], [0, 0, 10, 20, "b"], [0, 0, 15, 40, "c"], [0, 0, 30, 50, "d"]]
    assert levels(bars) == [[bars[0]], [bars[1], bars[3]], [bars[2]]]


def test_without_the_package_an_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "perfetto.trace_builder.proto_builder", None)
    with pytest.raises(ConfigError, match="pip install perfetto"):
        REPORT.save(tmp_path / "trace.pftrace")
