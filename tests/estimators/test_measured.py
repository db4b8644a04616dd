"""Library calls are measured on this device once per shape, cached on disk, and only if that is asked for or useful."""

import json
import time

import pytest
import torch

import overlapc
from overlapc.estimators import measured
from overlapc.estimators.calibration.clock import CpuClock
from overlapc.estimators.measured import Call, MeasuredCalls, Times, measure
from overlapc.estimators.nccl_own import LibraryCollectives
from overlapc.planning.estimator_chain import measures
from overlapc.report import record
from overlapc.schedule.model import Comm, Kind, Node
from overlapc.schedule.text import parse

CPU = torch.device("cpu")


def sources(cache, function, *inputs, **options):
    """Compile and run `function`; return by op the source of the estimate of every library call."""
    record.clear()
    torch._dynamo.reset()
    torch.compile(function, backend="overlapc", options={"cache_dir": cache, "profile": "cpu-gloo", **options})(*inputs)
    (graph,) = record.report_of_process().steps[0].graphs
    return {n.op: n.estimate.source for n in parse(graph.schedule).nodes if n.kind is Kind.EXTERN}


def test_matmuls_and_attention_are_measured_once_per_shape(cache):
    def both(x, w):
        y = (x @ w).view(1, 2, 8, 16)
        return torch.nn.functional.scaled_dot_product_attention(y, y, y)

    x, w = torch.randn(16, 32), torch.randn(32, 16)
    found = sources(cache, both, x, w, measure_matmuls=True)
    assert found["mm"] == "measured here"
    assert all(source == "measured here" for op, source in found.items() if "attention" in op)
    (kept,) = (cache / "measured").rglob("*.json")
    times = json.loads(kept.read_text())["ns"]
    assert "aten.mm.default(float32[16 32](32 1), float32[32 16](16 1))" in times
    before = kept.stat().st_mtime_ns
    sources(cache, both, x, w, measure_matmuls=True)
    assert kept.stat().st_mtime_ns == before  # nothing was measured again


def test_products_of_views_are_measured(cache):
    def products(x, w):
        return x[:, 3:19].t() @ x[:, 3:19], w[::2, 5:].t() @ w[::2, 7:]

    found = sources(cache, products, torch.randn(24, 40), torch.randn(26, 11), measure_matmuls=True)
    assert found == {"mm": "measured here"}


def test_measuring_does_not_change_the_users_random_numbers(cache):
    x = torch.randn(8, 8)
    torch.manual_seed(3)
    sources(cache, lambda x: x @ x, x, measure_matmuls=True)
    measured = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(measured, torch.rand(3))


def test_nothing_is_measured_by_default_on_cpus_or_in_deterministic_mode(cache):
    x = torch.randn(8, 8)
    assert sources(cache, lambda x: x @ x, x)["mm"] == "roofline cpu-gloo"
    torch.use_deterministic_algorithms(True)
    try:
        assert sources(cache, lambda x: x @ x, x, measure_matmuls=True)["mm"] == "roofline cpu-gloo"
    finally:
        torch.use_deterministic_algorithms(False)
    assert not (cache / "measured").exists()


def test_by_default_a_gpu_is_measured_only_for_graphs_that_communicate():
    gpu = torch.device("cuda")
    assert measures(overlapc.Config(), gpu, communicates=True)
    assert not measures(overlapc.Config(), gpu, communicates=False)
    assert measures(overlapc.Config(measure_matmuls=True), gpu, communicates=False)
    assert not measures(overlapc.Config(profile="h200-nvlink"), gpu, communicates=True)
    assert not measures(overlapc.Config(), CPU, communicates=True)


def test_processes_add_to_one_file_and_a_damaged_file_counts_as_empty(cache):
    one, other = Times(cache, CPU), Times(cache, CPU)
    one.put("a", 1.0)
    other.put("b", 2.0)
    assert not one.path.exists()  # the ranks of a host would wait for each other at each time
    one.store()
    other.store()
    assert other.get("a") == 1.0
    again = Times(cache, CPU)
    assert (again.get("a"), again.get("b"), again.get("c")) == (1.0, 2.0, None)
    again.path.write_text("{")
    assert Times(cache, CPU).get("a") is None


def test_times_that_another_process_has_stored_are_not_written_again(cache):
    one, other = Times(cache, CPU), Times(cache, CPU)
    for each in (one, other):
        each.put("a", 1.0)
        each.put("b", 2.0)
    one.store()
    written = one.path.stat().st_mtime_ns
    other.store()
    one.store()
    assert one.path.stat().st_mtime_ns == written


def test_a_call_that_runs_out_of_memory_is_left_to_the_next_estimator(cache):
    def too_large():
        raise torch.OutOfMemoryError("not today")

    node = Node("m", Kind.EXTERN, "mm")
    calls = MeasuredCalls(lambda _: Call("k", CPU, too_large), Times(cache, CPU))
    assert calls.estimate(node) is None
    assert not calls.times.path.exists()


@pytest.mark.parametrize("kind", ["all_gather", "unknown"])
def test_nccl_is_not_asked_without_a_process_group(kind):
    comm = Comm(kind, 2**20, "dp", 4, "bfloat16", (0, 1, 2, 3))
    assert LibraryCollectives().estimate(Node("g", Kind.START, kind, comm=comm)) is None  # no process group here
    assert LibraryCollectives().estimate(Node("k", Kind.KERNEL, "kernel")) is None


def test_the_users_estimate_precedes_a_measurement(cache):
    x = torch.randn(8, 8)
    found = sources(cache, lambda x: x @ x, x, measure_matmuls=True, estimates=lambda node: 5.0)
    assert found["mm"] == "user"
    assert overlapc.Config(measure_matmuls="").measure_matmuls is None


class Queued(CpuClock):
    """A clock of a CPU that is measured like a GPU."""

    queued = True


@pytest.mark.parametrize("long", [False, True])
def test_making_the_arguments_is_part_of_the_pause_before_a_burst(monkeypatch: pytest.MonkeyPatch, long: bool):
    def make():
        until = time.perf_counter() + (0.04 if long else 0.0)
        while time.perf_counter() < until:
            pass
        return lambda: None

    monkeypatch.setattr(measured, "clock_for", lambda device: Queued())
    pauses: list[float] = []
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert measure(Call("key", CPU, make)) is not None
    (pause_s,) = pauses
    assert pause_s == 0 if long else 0 < pause_s <= 0.03
