"""What a graph costs the host, and that only a profile that knows says so."""

import json
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from overlapc.errors import ConfigError
from overlapc.estimators.device import DeviceProfile, HostCosts
from overlapc.estimators.host import host_ns
from overlapc.estimators.profiles.profile_file import load_profile, profile_from_json, profile_to_json
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context
from overlapc.passes.run import run_pipeline
from overlapc.report.graph_record import graph_record
from overlapc.report.model import StepRecord
from overlapc.report.record import Report, load
from overlapc.schedule.text import parse

COSTS = HostCosts(kernel=1e6, call=1e5, collective=1e4, tensor=1e3, graph=100.0, argument=1.0)
GPU = DeviceProfile("gpu", host=COSTS)
GATHERED = """schedule g
%p = input : 8B
%q = input : 8B
%x = input : 8B
g, h = all_gather(%p, %q) @dp : 8B, 8B 10ns
%w = wait(g)
%v = wait(h)
r = all_reduce(%x) @dp : 8B 10ns
%z = wait(r)
m = extern:mm(%w, %v) : 8B 5ns
k = kernel(m, %z) : 8B 5ns
n = kernel(k) : 8B 5ns
return n, k
"""


def test_each_node_costs_what_its_kind_does_and_each_tensor_at_the_border_too():
    """Two kernels, a call, two collectives of which one has a second tensor; three tensors come in and two go out."""
    assert host_ns(parse(GATHERED), GPU) == 2e6 + 1e5 + 2e4 + 1e3 + 100 + 5


def test_it_is_known_only_where_it_was_measured_and_is_not_the_device_itself():
    assert host_ns(parse(GATHERED), DeviceProfile("gpu")) is None
    assert host_ns(parse(GATHERED), replace(GPU, synchronous=True)) is None


@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.integers(1, 60), st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_in_a_loop_the_slower_of_host_and_device_says_how_long_a_step_takes(kernels, gather, beside):
    """The simulator's own host, over many steps behind each other: it runs ahead until it is what all wait for."""

    def step_ns(launch_ns):
        def text(steps):
            lines = []
            for step in range(steps):
                lines.append(f"g{step} = all_gather(%p) @dp : 8B {gather}ns")
                names = [f"k{step}_{at} = kernel(%x) : 8B {ns}ns" for at, ns in enumerate(kernels)]
                names.insert(min(beside, len(kernels)), f"w{step} = wait(g{step})")
                lines += names
            return parse("\n".join(lines))

        short, long = (simulate(text(steps), DeviceProfile("gpu", launch_ns=launch_ns)).step_ns for steps in (60, 90))
        return (long - short) / 30

    launch_ns = 16
    host, device = launch_ns * (len(kernels) + 1), step_ns(0)
    assume(abs(host - device) > 0.1 * device)  # else the host takes many steps to run ahead
    assert step_ns(launch_ns) == pytest.approx(max(host, device), rel=0.02)


def test_no_order_depends_on_it():
    plain, known = (run_pipeline(parse(GATHERED), Context(profile=each)) for each in (replace(GPU, host=None), GPU))
    assert str(known.schedule) == str(plain.schedule)
    assert known.after.step_ns == plain.after.step_ns


def test_a_report_keeps_it_and_a_step_takes_as_long_as_the_host_if_that_is_longer(tmp_path):
    graph = graph_record(run_pipeline(parse(GATHERED), Context(profile=GPU)))
    step = StepRecord(graphs=(graph, graph))
    assert step.step_ns == step.step_before_ns == step.lower_bound_ns == step.host_ns == 2 * graph.host_ns
    assert load(Report((step,)).save(tmp_path / "record.json")).steps == (step,)
    quick = StepRecord(graphs=(replace(graph, host_ns=1.0),))
    assert quick.step_ns == graph.after.step_ns > 1
    assert quick.lower_bound_ns == graph.lower_bound_ns
    assert StepRecord(graphs=(graph, replace(graph, host_ns=None))).host_ns is None


def test_a_profile_keeps_it_and_refuses_kinds_that_it_does_not_know(tmp_path):
    written = profile_to_json(GPU)
    assert profile_from_json(written).host == COSTS
    assert profile_from_json(profile_to_json(DeviceProfile("gpu"))).host is None
    written["quantities"]["host"]["value"]["kernels"] = 1.0
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="kernels"):
        load_profile(path)
