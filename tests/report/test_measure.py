"""Profiler traces are matched to nodes: synthetic traces of a GPU and a real one of a CPU."""

import gzip
import json
import re
from dataclasses import replace

import pytest
import torch

import overlapc
from overlapc.errors import ConfigError
from overlapc.report import compare, record, trace_reading
from overlapc.report.measure import with_trace
from overlapc.report.model import GraphRecord, Plan, Span, StepRecord
from overlapc.report.record import NothingCompiled, Report
from overlapc.report.trace_reading import read_trace
from overlapc.runtime.marks import Label

US = 1e3


def mark(how, node, ts, dur, works=1, queue=""):
    label = Label("forward_0", how, node, works, queue)
    return {"ph": "X", "cat": "user_annotation", "name": str(label), "ts": ts, "dur": dur, "tid": 1}


def launch(correlation, ts, tid=1, category="cuda_driver"):
    return {"ph": "X", "cat": category, "name": "cuLaunchKernel", "ts": ts, "dur": 1, "tid": tid,
            "args": {"correlation": correlation}}  # fmt: skip


def kernel(correlation, ts, dur, name="k"):
    return {"ph": "X", "cat": "kernel", "name": name, "ts": ts, "dur": dur, "tid": 7,
            "args": {"correlation": correlation}}  # fmt: skip


def copied(ts, dur, stream=20):
    return {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "ts": ts, "dur": dur,
            "tid": stream, "args": {"correlation": 1000 + ts}}  # fmt: skip


def by_copies(*copies):
    """Return a step whose gathers go by copies, two of ag0 and one of ag1; compute then waits for other ranks' copies
    from 160 on, where k0 ends, and the host launches mm0 at 150."""
    return [
        mark("start", "ag0", 0, 2, 2, "@dp"), mark("start", "ag1", 2, 2, 1, "@dp"), *copies,
        mark("launch", "k0", 6, 3), launch(1, 7), kernel(1, 100, 60),
        mark("wait", "w0", 10, 1), mark("wait", "w1", 11, 1),
        mark("call", "mm0", 150, 5), launch(2, 151), kernel(2, 190, 30),
    ]  # fmt: skip


BY_COPIES = """schedule forward_0
p = input : 1MiB
x = input : 1MiB
ag0 = all_gather(p) @dp(4) via copy : 4MiB 50us [table t]
ag1 = all_gather(x) @dp(4) via copy : 4MiB 50us [table t]
k0 = kernel(x) : 1MiB 20us [roofline r]
w0 = wait(ag0)
w1 = wait(ag1)
mm0 = extern:mm(k0, w0, w1) flops=1000000000 : 1MiB 30us [roofline r]
"""


TOTALS = re.compile("forward_0 +(communication|exposed|idle) .*ms .*ms")


def of_copies(tmp_path, *copies):
    """Return the graph with the times of that step."""
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": by_copies(*copies)}))
    return with_trace(replace(GRAPH, schedule=BY_COPIES), read_trace(path))


def step_on_gpu(at, first):
    """Return the events of a step: k0 overlaps ag0 for 20 of its 60 us, then the device is idle for 10 us, then mm0
    runs as two kernels."""
    return [
        mark("start", "ag0", at, 5), launch(first, at + 1, category="cuda_runtime"),
        mark("launch", "k0", at + 6, 3), launch(first + 1, at + 7),
        mark("wait", "w0", at + 10, 2),
        mark("call", "mm0", at + 13, 5), launch(first + 2, at + 14), launch(first + 3, at + 15),
        launch(first + 4, at + 30),  # outside of all marks
        kernel(first, at + 100, 60, "ncclDevKernel_AllGather"),
        kernel(first + 1, at + 100, 20),
        kernel(first + 2, at + 170, 30), kernel(first + 3, at + 200, 10), kernel(first + 4, at + 220, 99),
    ]  # fmt: skip


SCHEDULE = """schedule forward_0
p = input : 1MiB
x = input : 1MiB
ag0 = all_gather(p) @dp(4) : 4MiB 50us [table t]
k0 = kernel(x) : 1MiB 20us [roofline r]
w0 = wait(ag0)
mm0 = extern:mm(k0, w0) flops=1000000000 : 1MiB 30us [roofline r]
"""
GRAPH = GraphRecord(
    name="forward_0",
    schedule=SCHEDULE,
    before=Plan(100 * US),
    after=Plan(
        100 * US,
        (
            Span("ag0", "@dp", 0.0, 60 * US, "start"),
            Span("k0", "compute", 0.0, 20 * US, "kernel"),
            Span("ag0", "compute", 20 * US, 60 * US, "idle"),
            Span("mm0", "compute", 60 * US, 90 * US, "extern"),
        ),
    ),
    lower_bound_ns=80 * US,
    peak_bytes=100,
    incoming_peak_bytes=100,
)


@pytest.fixture
def gpu_trace(tmp_path):
    path = tmp_path / "trace.json"
    events = step_on_gpu(0, 0) + step_on_gpu(1000, 10)
    path.write_text(json.dumps({"traceEvents": events, "distributedInfo": {"rank": 1}}))
    return path


def test_kernels_belong_to_the_mark_around_their_launch(gpu_trace):
    trace = read_trace(gpu_trace)
    assert trace.on_device
    assert trace.rank == 1
    assert len(trace.runs["forward_0"]) == 2
    measured = with_trace(GRAPH, trace).measured
    assert measured.runs == 2
    assert measured.nodes == {"ag0": 60 * US, "k0": 20 * US, "mm0": 40 * US}
    assert (measured.step_ns, measured.compute_ns, measured.comm_ns) == (110 * US, 60 * US, 60 * US)
    assert (measured.exposed_ns, measured.idle_ns) == (40 * US, 10 * US)
    assert measured.beside == {"ag0": pytest.approx(1 / 3), "k0": 1.0, "mm0": 0.0}


def test_a_gap_that_waits_for_no_collective_is_idle(tmp_path):
    events = [
        mark("start", "ag0", 0, 5), launch(0, 1), kernel(0, 100, 60, "ncclDevKernel_AllGather"),
        mark("launch", "k0", 6, 3), launch(1, 7), kernel(1, 100, 10),
        mark("launch", "k1", 10, 3), launch(2, 11), kernel(2, 113, 7),  # 3 us between kernels
        mark("launch", "k2", 125, 3), launch(3, 126), kernel(3, 130, 10),  # 10 us, for 5 of which the host is late
        mark("wait", "w0", 130, 2),
        mark("call", "mm0", 133, 9), launch(4, 134), kernel(4, 165, 5), launch(5, 135), kernel(5, 172, 3),
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    graph = replace(GRAPH, schedule=SCHEDULE.replace("w0 =", "k1 = kernel(x); k2 = kernel(x); w0 ="))
    measured = with_trace(graph, read_trace(path)).measured
    assert (measured.step_ns, measured.compute_ns) == (75 * US, 35 * US)
    assert measured.exposed_ns == 20 * US  # from the end of k2 to that of ag0, for which mm0 waits
    assert measured.exposed == {"ag0": 20 * US}
    assert [(span.node, span.start_ns, span.end_ns) for span in measured.spans if span.kind == "idle"] == [
        ("ag0", 40 * US, 60 * US)
    ]
    assert measured.idle_ns == (3 + 10 + 5 + 2) * US
    assert measured.late_ns == 5 * US


def test_exposed_time_belongs_to_the_collective_that_the_next_kernel_waits_for(tmp_path):
    """ag0 and ag1 run one after the other, and both waits precede mm0; the wait for ag2 comes last."""
    schedule = SCHEDULE.replace(
        "k0 =", "ag1 = all_gather(p) @dp(4) : 4MiB 50us\nag2 = all_gather(p) @tp(4) : 4MiB 9us\nk0 ="
    )
    schedule = schedule.replace("w0 = wait(ag0)", "w0 = wait(ag0)\nw1 = wait(ag1)") + "w2 = wait(ag2)\n"
    events = [
        mark("start", "ag0", 0, 2), launch(0, 1), kernel(0, 100, 30, "ncclDevKernel_AllGather"),
        mark("start", "ag1", 2, 2), launch(1, 3), kernel(1, 130, 40, "ncclDevKernel_AllGather"),
        mark("start", "ag2", 4, 2), launch(2, 5), kernel(2, 110, 120, "ncclDevKernel_AllGather"),
        mark("launch", "k0", 6, 3), launch(3, 7), kernel(3, 100, 20),
        mark("wait", "w0", 10, 1), mark("wait", "w1", 11, 1),
        mark("call", "mm0", 13, 5), launch(4, 14), kernel(4, 170, 30),
        mark("wait", "w2", 20, 1),
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    measured = with_trace(replace(GRAPH, schedule=schedule), read_trace(path)).measured
    assert measured.exposed == {"ag0": 10 * US, "ag1": 40 * US, "ag2": 30 * US}
    assert sum(measured.exposed.values()) == measured.exposed_ns == 80 * US
    waits = [(span.node, span.start_ns, span.end_ns) for span in measured.spans if span.kind == "idle"]
    assert waits == [("ag0", 20 * US, 30 * US), ("ag1", 30 * US, 70 * US), ("ag2", 100 * US, 130 * US)]


def test_copies_between_gpus_are_counted_off_and_a_wait_for_those_of_other_ranks_is_exposed(tmp_path):
    copies = [copied(120, 5), copied(110, 10), copied(140, 10)]  # in any order in the file
    measured = of_copies(tmp_path, *copies).measured
    assert measured.nodes == {"ag0": 15 * US, "ag1": 10 * US, "k0": 60 * US, "mm0": 30 * US}
    assert (measured.step_ns, measured.compute_ns) == (120 * US, 90 * US)
    assert (measured.exposed_ns, measured.idle_ns) == (30 * US, 0)
    assert measured.exposed == {"ag1": 30 * US}
    assert measured.shows_communication
    assert TOTALS.search(str(Report((StepRecord(graphs=(replace(GRAPH, measured=measured),)),))))


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param([], id="none in the trace"),
        pytest.param([copied(110, 10)], id="fewer than were started"),
        pytest.param([copied(at, 5, stream) for at in (110, 120, 130) for stream in (20, 21)], id="on two streams"),
    ],
)
def test_copies_that_cannot_be_told_apart_are_not_measured(tmp_path, copies):
    graph = of_copies(tmp_path, *copies)
    assert graph.measured.nodes == {"k0": 60 * US, "mm0": 30 * US}
    assert not graph.measured.shows_communication
    report = Report((StepRecord(rank=0, world_size=4, graphs=(graph,)),))
    text = str(report)
    assert "idle, or waiting for collectives that the trace does not show 0.030 ms" in text
    assert "collectives: 0 of 2 measured" in text
    assert not TOTALS.search(text)


def test_only_the_last_runs_count_when_asked(tmp_path):
    path = tmp_path / "trace.json"
    slower = [
        {**event, "dur": 45} if event["name"] == "k" and event["dur"] == 20 else event
        for event in step_on_gpu(1000, 10)
    ]
    path.write_text(json.dumps({"traceEvents": step_on_gpu(0, 0) + slower}))
    trace = read_trace(path)
    assert with_trace(GRAPH, trace).measured.nodes["k0"] == (20 + 45) / 2 * US
    assert with_trace(GRAPH, trace, last=1).measured.nodes["k0"] == 45 * US
    assert with_trace(GRAPH, trace, last=1).measured.runs == 1


def test_a_kernel_without_a_launch_is_matched_by_the_id_of_its_mark(tmp_path):
    path = tmp_path / "trace.json"
    marked = {**mark("launch", "k0", 0, 5), "args": {"External id": 42}}
    ran = kernel(1, 10, 20)
    ran["args"]["External id"] = 42
    path.write_text(json.dumps({"traceEvents": [marked, ran]}))
    assert with_trace(GRAPH, read_trace(path)).measured.nodes == {"k0": 20 * US}


def test_prediction_is_compared_with_contention_and_flagged(gpu_trace):
    graph = with_trace(GRAPH, read_trace(gpu_trace))
    rows = {row.node: row for row in compare.rows(graph)}
    assert rows["ag0"].ratio == 1.0  # 50 us alone, 60 us predicted with contention
    assert not rows["ag0"].far_off
    assert rows["mm0"].ratio == pytest.approx(40 / 30)
    assert rows["mm0"].far_off
    assert "w0" not in rows
    line = next(line for line in compare.graph_text(graph).splitlines() if line.startswith("mm0"))
    assert line.split() == ["mm0", "mm", "1", "GFLOP", "30.0", "30.0", "40.0", "1.33", "off"]
    totals = compare.totals_text(StepRecord(0, 4, (graph,), 110))
    assert "100B predicted, 110B allocated at most (ratio 1.100" in totals
    assert "library calls: 1 of 1 measured, half within 33%, 1 off by more than 20%\n  1 without overlap" in totals
    assert "half within 33%, 1.33 of the estimate" in totals  # mm0 ran without overlap, so its estimate was wrong
    assert (
        "1 overlapped throughout: half within 0 percentage points" in totals
    )  # k0 overlapped ag0 and took as long as predicted


def test_a_trace_goes_to_its_rank_and_survives_a_file(gpu_trace, tmp_path):
    report = Report((StepRecord(0, 2, (GRAPH,)), StepRecord(1, 2, (GRAPH,))))
    measured = overlapc.report.report_with_trace(report, gpu_trace)
    assert [(step.rank, step.graphs[0].measured is not None) for step in measured.steps] == [(1, True), (0, False)]
    assert record.load(measured.save(tmp_path / "record.json")) == measured
    page = measured.save(tmp_path / "report.html").read_text()
    assert "predicted and measured" in page


def test_a_compressed_trace_is_read(gpu_trace, tmp_path):
    compressed = tmp_path / "trace.json.gz"
    compressed.write_bytes(gzip.compress(gpu_trace.read_bytes()))
    assert read_trace(compressed) == read_trace(gpu_trace)
    compressed.write_bytes(compressed.read_bytes()[:99])
    with pytest.raises(ConfigError, match=r"cannot read .*trace\.json\.gz: Compressed file ended"):
        read_trace(compressed)


def test_other_files_are_refused(gpu_trace, tmp_path):
    other = Report((StepRecord(1, 2, (GRAPH.__class__(**{**_fields(GRAPH), "name": "inference_3"}),)),))
    with pytest.raises(ConfigError, match="holds other graphs"):
        overlapc.report.report_with_trace(other, gpu_trace)
    (tmp_path / "no.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a Chrome trace"):
        read_trace(tmp_path / "no.json")


def test_a_trace_of_another_program_with_graphs_of_the_same_names_is_refused(gpu_trace):
    other = replace(GRAPH, schedule=SCHEDULE.replace("k0", "add"))
    with pytest.raises(ConfigError, match="holds other graphs"):
        overlapc.report.report_with_trace(Report((StepRecord(1, 2, (other,)),)), gpu_trace)


def test_a_trace_of_a_rank_that_the_record_lacks_is_refused(gpu_trace):
    with pytest.raises(ConfigError, match="is a trace of rank 1, but the record has only rank 0"):
        overlapc.report.report_with_trace(Report((StepRecord(0, 2, (GRAPH,)),)), gpu_trace)


def _fields(graph):
    return {name: getattr(graph, name) for name in graph.__dataclass_fields__}


def test_gloo_operations_are_matched_to_starts_in_order(tmp_path):
    def gloo(ts, dur):
        return {"ph": "X", "cat": "user_annotation", "name": "gloo:all_reduce", "ts": ts, "dur": dur, "tid": 9}

    events = [
        gloo(0, 5),  # before the first start, so it belongs to no node
        mark("start", "rs0", 10, 2, works=2), gloo(11, 10), gloo(12, 20),
        mark("launch", "k0", 13, 4),
        mark("start", "ag0", 20, 2), gloo(33, 7),
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    trace = read_trace(path)
    assert not trace.on_device
    graph = replace(GRAPH, schedule=f"{SCHEDULE}rs0 = reduce_scatter(p, x) @dp(4)\nw1 = wait(rs0)")
    assert with_trace(graph, trace).measured.nodes == {"rs0": 21 * US, "k0": 4 * US, "ag0": 7 * US}


def test_a_real_step_on_a_cpu_is_measured():
    torch._dynamo.reset()
    record.clear()
    weight = torch.rand(64, 64, requires_grad=True)
    x = torch.rand(64, 64)
    step = torch.compile(lambda x: torch.relu(x @ weight).sum(), backend="overlapc", options={"profile": "cpu-gloo"})
    step(x).backward()
    expected = weight.grad.clone()
    with overlapc.report.measure() as measured:
        for _ in range(3):
            weight.grad = None
            step(x).backward()
    torch.testing.assert_close(weight.grad, expected)  # the marked version computes the same
    report = overlapc.report(step)
    assert report == measured.report
    for graph in report.steps[0].graphs:
        assert graph.measured.runs == 3
        assert all(row.measured_ns > 0 for row in compare.rows(graph))
        assert graph.measured.compute_ns <= graph.measured.step_ns
    kernels = sum(row.kind == "kernel" for graph in report.steps[0].graphs for row in compare.rows(graph))
    assert kernels
    assert f"kernels: {kernels} of {kernels} measured" in str(report)
    assert "predicted and measured (3 run(s))" in str(report)


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_nothing_compiled_while_measuring_is_an_error(name, tmp_path):
    record.clear()
    with pytest.raises(NothingCompiled, match="ran while measuring"), overlapc.report.measure(tmp_path / name):
        torch.ones(3).add(1)


def test_a_trace_that_cannot_be_read_says_why(monkeypatch):
    monkeypatch.setattr(trace_reading, "_MOST_BYTES", 0)
    with pytest.raises(ConfigError, match="is longer than 0 MiB"), overlapc.report.measure():
        torch.ones(3).add(1)
