"""Records of real schedules, planned by the passes and simulated."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from overlapc.estimators.device import DeviceProfile
from overlapc.passes.base import Context
from overlapc.passes.run import run_pipeline
from overlapc.report.graph_record import graph_record
from overlapc.report.model import StepRecord
from overlapc.report.record import Report, load
from overlapc.report.text import graph_text
from overlapc.schedule.model import Origin
from overlapc.schedule.text import parse

STEP = """\
schedule step
%p0 = input : 1MiB
%p1 = input : 1MiB
ag0 = all_gather(%p0) @dp(2) : 2MiB  100us [table x]
%w0 = wait(ag0)
mm0 = extern:mm(%w0)         : 1MiB  80us [roofline]
ag1 = all_gather(%p1) @dp(2) : 2MiB  100us [table x]
%w1 = wait(ag1)
k0  = kernel(mm0)            : 1MiB  30us [roofline]
mm1 = extern:mm(%w1, k0)     : 1MiB  80us [roofline]
ar0 = comm:all_reduce(mm1) @tp(4) : 1MiB  20us [table x]
odd = extern:sort(ar0)       : 1MiB
return odd
"""


@pytest.fixture(scope="module")
def graph():
    schedule = parse(STEP)
    origin = Origin(("mm",), "model.py:3: x @ w", "layers.0.mlp")
    nodes = (replace(node, origin=origin) if node.name == "mm0" else node for node in schedule.nodes)
    result = run_pipeline(replace(schedule, nodes=tuple(nodes)), Context(peak_increase=1.0))
    return graph_record(result, fallbacks={"aten.sort": 1}, compile_seconds=2.0)


def test_compute_without_overlap_is_the_sum_of_its_estimates(graph):
    assert graph.alone_ns == pytest.approx((80 + 30 + 80) * 1e3)


def test_times_and_counts_are_those_of_the_simulator(graph):
    assert graph.before.step_ns == pytest.approx(410e3)
    assert graph.after.step_ns == pytest.approx(310e3)  # ag1 hides behind mm0 and k0
    assert graph.exposed_after_ns < graph.exposed_before_ns == pytest.approx(220e3)
    assert graph.lower_bound_ns <= graph.after.step_ns
    assert (graph.kernels, graph.externs, graph.unknown) == (1, 2, ("odd",))
    assert graph.peak_bytes >= graph.incoming_peak_bytes > 0


def test_every_collective_has_a_row_and_the_row_adds_up(graph):
    assert [(row.name, row.op, row.group, row.ranks) for row in graph.collectives] == [
        ("ag0", "all_gather", "dp", 2),
        ("ag1", "all_gather", "dp", 2),
        ("ar0", "all_reduce", "tp", 4),
    ]
    for row in graph.collectives:
        assert row.hidden_after_ns + row.exposed_after_ns == pytest.approx(row.estimate_ns)
    assert graph.collectives[1].moves > 0
    assert graph.collectives[1].hidden_after_ns > graph.collectives[1].hidden_before_ns
    table = graph_text(graph)
    for row in graph.collectives:
        assert f"{row.name} {row.op}" in table


def test_idle_spans_are_the_exposed_time(graph):
    for plan, exposed_ns in ((graph.before, graph.exposed_before_ns), (graph.after, graph.exposed_after_ns)):
        idle = sum(span.end_ns - span.start_ns for span in plan.spans if span.kind == "idle")
        assert idle == pytest.approx(exposed_ns)


def test_each_resource_does_one_thing_at_a_time(graph):
    for plan in (graph.before, graph.after):
        assert {span.lane for span in plan.spans} == {"compute", "@dp", "@tp"}
        for lane in ("compute", "@dp", "@tp"):
            spans = sorted((span.start_ns, span.end_ns) for span in plan.spans if span.lane == lane)
            for (_, end_ns), (start_ns, _) in itertools.pairwise(spans):
                assert start_ns >= end_ns - 1e-6


def test_memory_reaches_the_peak_and_goes_forward_in_time(graph):
    times = [time_ns for time_ns, _ in graph.memory]
    assert times == sorted(times)
    assert max(size for _, size in graph.memory) == graph.peak_bytes


def test_the_schedule_reads_back_and_nothing_is_lost_on_disk(graph, tmp_path):
    assert parse(graph.schedule).name == "step"
    report = Report((StepRecord(graphs=(graph,)),))
    assert load(report.save(tmp_path / "record.json")) == report


def test_a_bucket_over_several_modules_names_the_first_and_the_last():
    gathers = "".join(
        f"ag{at} = all_gather(%p{at}) @dp(2) unit=layers.{at} : 1KiB 11us [table x]\n%w{at} = wait(ag{at})\n"
        f"k{at} = kernel(%w{at}) : 1KiB 1us [roofline]\n"
        for at in range(3)
    )
    inputs = "".join(f"%p{at} = input : 1KiB\n" for at in range(3))
    schedule = parse(f"schedule step\n{inputs}{gathers}return k0, k1, k2\n")
    profile = DeviceProfile("floor", collective_floor_ns=10e3)
    graph = graph_record(run_pipeline(schedule, Context(profile=profile, peak_increase=1.0)))
    assert [(row.name, row.origin) for row in graph.collectives] == [("ag0+2", "layers.0 to layers.2")]
