"""`overlapc plan --model`: a training step planned for many ranks in one process."""

import re
import time
from dataclasses import replace

import pytest
import torch.distributed as dist

from overlapc.config import Config
from overlapc.errors import ConfigError
from overlapc.launch import plan_model as plan_model_module
from overlapc.launch.llama import Llama
from overlapc.launch.plan import plan_text
from overlapc.launch.plan_model import FEW, PlanConfig, parse_mesh, plan_model
from overlapc.report.record import Report
from overlapc.schedule.model import Kind
from overlapc.schedule.text import parse

H200 = {"profile": "h200-nvlink"}
FEW_PASSES = {"passes": "bucket,raise_under_memory,sink_waits"}  # for tests that do not need the search


def planned(mesh, world_size=0, layers=1, whole=False, **options):
    cfg = PlanConfig.of("tiny", mesh, world_size, 64, 1, layers, "bf16", True)
    return plan_model(cfg, Config.of({**H200, **options}), whole=whole)


def gathered_bytes(report):
    return sum(
        node.comm.bytes
        for graph in report.steps[0].graphs
        for node in parse(graph.schedule).nodes
        if node.kind is Kind.START and node.comm.collective == "all_gather"
    )


def test_a_thousand_ranks_are_planned_in_seconds():
    small = planned("dp=8")
    began = time.process_time()
    large = planned("dp=8,replicate=128", 1024)
    assert time.process_time() - began < 30
    assert not dist.is_initialized()
    (step,) = large.steps
    assert step.world_size == 1024
    assert [graph.name.split("_")[0] for graph in step.graphs] == ["forward", "backward"]
    assert all(0 < graph.lower_bound_ns <= graph.after.step_ns for graph in step.graphs)
    assert all(graph.peak_bytes > 0 and not graph.unknown for graph in step.graphs)
    assert gathered_bytes(large) == gathered_bytes(small)  # the groups that gather have 8 ranks in both
    reduced = {row.op for graph in step.graphs for row in graph.collectives}
    assert "all_reduce" in reduced  # between the replicas


def test_tensor_parallel_ranks_hold_less():
    one, two = planned("dp=2", **FEW_PASSES), planned("dp=2,tp=2", **FEW_PASSES)
    groups = {row.group for graph in two.steps[0].graphs for row in graph.collectives}
    assert len(groups) == 2
    assert max(g.peak_bytes for g in two.steps[0].graphs) < max(g.peak_bytes for g in one.steps[0].graphs)


def test_gradients_are_averaged_by_nccl_or_by_a_kernel_as_on_the_planned_machine():
    """NCCL averages within a reduce-scatter, so on GPUs no kernel divides afterwards; over gloo a kernel divides."""

    def divided(report):
        schedule = parse(report.steps[0].graphs[1].schedule)
        return sum(schedule.first_reader(wait) is not None for wait in schedule.waits() if "reduce" in wait.reads[0])

    assert divided(planned("dp=2", **FEW_PASSES)) == 0
    assert divided(planned("dp=2", profile="cpu-gloo", **FEW_PASSES)) > 0


def texts(report):
    """Return the final schedules without the graph numbers, which count the compilations of this process."""
    return [re.sub(r"_\d+\n", "\n", graph.schedule, count=1) for graph in report.steps[0].graphs]


def test_schedules_of_many_layers_are_extrapolated_exactly(monkeypatch):
    layers = sum(FEW) + 1
    whole = planned("dp=2", layers=layers, whole=True, **FEW_PASSES)
    traced = []
    monkeypatch.setattr(plan_model_module, "Llama", lambda shape: traced.append(shape.layers) or Llama(shape))
    assert texts(planned("dp=2", layers=layers, **FEW_PASSES)) == texts(whole)
    assert traced == list(FEW)


def test_layers_that_cannot_be_extrapolated_are_all_traced_with_a_warning(monkeypatch):
    monkeypatch.setattr(plan_model_module, "FEW", (1, 2, 3))  # with one layer, it is both the first and the last
    with pytest.warns(UserWarning, match=r"all 7 layers are traced.*extrapolated from models of 1, 2, 3 layers"):
        report = planned("dp=2", layers=7, **FEW_PASSES)
    assert "layers.6" in report.steps[0].graphs[0].schedule


@pytest.mark.parametrize(
    ("mesh", "world_size", "axes"),
    [
        ("dp=4", 0, (1, 4, 1)),
        ("tp=2, dp=3", 6, (1, 3, 2)),
        ("tp=8", 1024, (1, 128, 8)),
        ("", 16, (1, 16, 1)),
        ("replicate=2,tp=2", 0, (2, 1, 2)),
    ],
)
def test_a_mesh_is_parsed_and_filled_up_to_the_world_size(mesh, world_size, axes):
    assert tuple(parse_mesh(mesh, world_size).values()) == axes


@pytest.mark.parametrize(
    ("mesh", "world_size", "message"),
    [
        ("dp", 0, "write it like"),
        ("dp=0", 0, "at least 1"),
        ("dp=2,dp=2", 0, "dp is given twice"),
        ("pp=2", 0, "no mesh axis named 'pp'"),
        ("tp=3", 16, "does not divide"),
        ("dp=4,tp=2", 16, "has 8 ranks, --world-size says 16"),
    ],
)
def test_an_unusable_mesh_is_an_error(mesh, world_size, message):
    with pytest.raises(ConfigError, match=message):
        parse_mesh(mesh, world_size)


def test_unknown_models_and_sizes_that_do_not_divide_are_an_error():
    with pytest.raises(ConfigError, match="nearest: llama-8b"):
        PlanConfig.of("llama-8", "dp=2", 0, 64, 1, 0, "bf16", True)
    with pytest.raises(ConfigError, match="does not divide"):
        PlanConfig.of("tiny", "tp=4", 0, 64, 1, 0, "bf16", True)


def test_saved_schedules_read_back_to_the_same_figures(tmp_path, monkeypatch):
    """The file contains what the simulator needs to know of the machine, so no profile is named; also module names."""
    monkeypatch.delenv("OVERLAPC_PROFILE", raising=False)
    cfg = PlanConfig.of("demo", "dp=64", 0, 2048, 4, 1, "bf16", True)
    (step,) = plan_model(cfg, Config.of(H200)).steps
    assert any(graph.full_load_ns for graph in step.graphs), "this step runs at the GPU clock of full load"
    report = Report((replace(step, calls={graph.name: 2 for graph in step.graphs}),))
    text = report.save(tmp_path / "schedule.txt").read_text()
    again = plan_text(text, Config.of({"passes": "none"}))
    was, now = report.steps[0], again.steps[0]
    for figure in ("world_size", "step_ns", "lower_bound_ns", "host_ns", "calls"):
        assert getattr(now, figure) == getattr(was, figure), figure
    for before, after in zip(was.graphs, now.graphs, strict=True):
        assert parse(after.schedule) == parse(before.schedule)
        assert [(span.node, span.start_ns, span.end_ns) for span in after.after.spans] == [
            (span.node, span.start_ns, span.end_ns) for span in before.after.spans
        ]
        assert [row.origin for row in after.collectives] == [row.origin for row in before.collectives]
        assert (after.alone_ns, after.peak_bytes) == (before.alone_ns, before.peak_bytes)
    assert again.save(tmp_path / "again_schedule.txt").read_text() == text


@pytest.mark.parametrize("what", ['machine {"graphs": 3}', "step {]}", 'step {"calls": {"forward_0": -1}}'])
def test_malformed_machine_and_step_lines_of_a_schedule_file_are_an_error(what):
    with pytest.raises(ConfigError, match=f"the line `# {what.split()[0]}` after the schedules is malformed"):
        plan_text(f"schedule s\nx = kernel() : 4B 1us\n# {what}\n", Config())


def test_forwards_peak_before_the_passes_is_its_own_and_not_what_backward_needs_beside_its_memory_pool():
    report = planned("dp=4", layers=4, transport="copy", memory_budget=480_000, **FEW_PASSES)
    forward = report.steps[0].graphs[0]
    assert forward.pool_bytes
    largest = max(size_bytes for _, size_bytes in forward.memory_before)
    assert largest <= forward.incoming_peak_bytes < 1.05 * largest, "a pool's layout takes a little more than is live"
