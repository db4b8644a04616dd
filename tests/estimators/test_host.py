"""The host time of a graph, which is known only if the profile has host costs."""

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


def test_host_time_is_the_sum_over_nodes_inputs_and_outputs():
    """Two kernels, a call, two collectives, one of which has a second tensor; three inputs and two outputs."""
    assert host_ns(parse(GATHERED), GPU) == 2e6 + 1e5 + 2e4 + 1e3 + 100 + 5


def test_host_time_is_unknown_without_host_costs_and_on_synchronous_devices():
    assert host_ns(parse(GATHERED), DeviceProfile("gpu")) is None
    assert host_ns(parse(GATHERED), replace(GPU, synchronous=True)) is None


@given(st.lists(st.integers(1, 40), min_size=2, max_size=8), st.integers(1, 60), st.integers(0, 7))
@settings(max_examples=60)
def test_in_a_loop_a_step_takes_as_long_as_the_slower_of_host_and_device(kernels, gather, beside):
    """Simulates many steps in a row: the host runs ahead unless it is the limit."""

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
    assume(abs(host - device) > 0.1 * device)  # otherwise the host needs many steps to run ahead
    assert step_ns(launch_ns) == pytest.approx(max(host, device), rel=0.02)


def test_plans_do_not_depend_on_host_costs():
    plain, known = (run_pipeline(parse(GATHERED), Context(profile=each)) for each in (replace(GPU, host=None), GPU))
    assert str(known.schedule) == str(plain.schedule)
    assert known.after.step_ns == plain.after.step_ns


def test_a_step_takes_at_least_its_host_time_also_in_a_saved_report(tmp_path):
    graph = graph_record(run_pipeline(parse(GATHERED), Context(profile=GPU)))
    step = StepRecord(graphs=(graph, graph))
    assert step.step_ns == step.step_before_ns == step.lower_bound_ns == step.host_ns == 2 * graph.host_ns
    assert load(Report((step,)).save(tmp_path / "record.json")).steps == (step,)
    quick = StepRecord(graphs=(replace(graph, host_ns=1.0),))
    assert quick.step_ns == graph.after.step_ns > 1
    assert quick.lower_bound_ns == graph.lower_bound_ns
    assert StepRecord(graphs=(graph, replace(graph, host_ns=None))).host_ns is None


def test_a_profile_stores_host_costs_and_refuses_unknown_ones(tmp_path):
    written = profile_to_json(GPU)
    assert profile_from_json(written).host == COSTS
    assert profile_from_json(profile_to_json(DeviceProfile("gpu"))).host is None
    written["quantities"]["host"]["value"]["kernels"] = 1.0
    path = tmp_path / "gpu.json"
    path.write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="kernels"):
        load_profile(path)
