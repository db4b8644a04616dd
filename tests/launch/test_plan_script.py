"""`overlapc plan SCRIPT`: a user's script for CUDA devices runs up to its first optimizer step and is planned for many
ranks."""

from __future__ import annotations

import os
import re
import sys
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch._dynamo import trace_rules
from torch.utils._device import _device_constructors

from overlapc.config import Config
from overlapc.errors import ConfigError, MemoryBudgetError
from overlapc.launch.cli import main
from overlapc.launch.plan_script import plan_script
from overlapc.launch.sweep import hardware
from overlapc.launch.without_gpus import gpus
from overlapc.report.held_memory import step_peak_bytes
from overlapc.runtime.counters import counted
from overlapc.schedule.text import parse
from overlapc.units import human_bytes
from tests import ROOT

SCRIPT = """
import os, sys
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import overlapc

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)
    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
begin.record()
dist.init_process_group("nccl")
mesh = init_device_mesh("cuda", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
model = nn.Sequential(Block(), Block()).to(device).bfloat16()
for block in model:
    overlapc.fully_shard(block, mesh=mesh["dp"])
overlapc.fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
step = torch.compile(model, backend="inductor")
for _ in range(int(sys.argv[1])):
    x = torch.randn(4, 64, device=device, dtype=torch.bfloat16)
    loss = step(x).float().square().mean()
    loss.backward()
    print("loss", loss.item())
end.record()
print("took", begin.elapsed_time(end))
{more}
optimizer.step()
raise AssertionError("nothing behind the first step runs")
"""
BY_BLOCKS = """
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
torch.distributed.init_process_group("nccl")
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2)), nn.Linear(64, 64))
for block in list(model)[:2]:
    {first}
fully_shard(model)
model(torch.ones(4, 64, device="cuda")).sum().backward()
torch.optim.SGD(model.parameters()).step()
"""
STATE = """
import torch
class Guarded(torch.optim.SGD):
    def step(self):
        raise AssertionError("no learning rate")
parameters = [torch.nn.Parameter(torch.zeros(1024)) for _ in range(8)]
optimizers = [{optimizers}]
torch.compile(lambda: sum((p * p).sum() for p in parameters))().backward()
for optimizer in optimizers:
    optimizer.step()
raise AssertionError("nothing behind the first step runs")
"""
CLOSURE = """
import torch
x = torch.nn.Parameter(torch.ones(8))
step = torch.compile(lambda: (x * x).sum())
optimizer = torch.optim.LBFGS([x])
def closure():
    optimizer.zero_grad()
    loss = step()
    loss.backward()
    return loss
optimizer.step(closure)
"""
H200 = {"profile": "h200-nvlink"}
FEW_PASSES = {**H200, "passes": "bucket,raise_under_memory,sink_waits"}  # for tests that do not need the search
FSDP2 = "from torch.distributed.fsdp import fully_shard"


@pytest.fixture
def script(tmp_path):
    def write(more: str = "") -> object:
        path = tmp_path / "train.py"
        path.write_text(SCRIPT.replace("{more}", more))
        return path

    return write


def test_a_script_is_planned_for_any_number_of_ranks_in_one_table(script, capsys, tmp_path):
    trace_rules.clear_lru_cache()  # as in a process that has compiled nothing
    path = script()
    saved = tmp_path / "plans.html"
    arguments = ["plan", str(path), "--world-size", "16,512", "--network", "400Gb/s", "--save", str(saved), "--", "2"]
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "loss nan" in text
    assert "took nan" in text
    rows = [line.split() for line in text.splitlines() if re.match(r" +(16|512) ", line)]
    assert [row[0] for row in rows] == ["16", "512"]
    few, many = (float(row[3]) for row in rows)  # exposed ms: a group of 8 ranks spans two hosts, one of 256 spans 64
    assert many > few
    assert "50 GB/s per GPU between hosts (--network 400Gb/s)" in text
    assert "<td>512</td>" in saved.read_text()
    assert not dist.is_initialized()
    assert torch.empty(1).to("cpu").item() is not None  # torch is not patched any more
    add = torch.compile(lambda x: x + torch.tensor(2.0), backend="eager", fullgraph=True)
    assert add(torch.ones(1)).item() == 3  # nor does Dynamo see patches


def test_a_step_consists_of_the_calls_before_the_first_optimizer_step(script):
    report, assumed = plan_script(
        script("first = [1, 2][torch.randint(2, (1,), device=device)]"), ["3"], 8, 8, Config.of(H200)
    )
    (step,) = report.steps
    (text,) = assumed
    assert re.search(r"from tensors, such as indices, are 0 \(\S+train.py:\d+\)$", text)
    assert [(graph.name.split("_")[0], times) for graph, times in step.called] == [("forward", 3), ("backward", 3)]
    assert step.world_size == 8
    assert {row.ranks for graph in step.graphs for row in graph.collectives} == {4}


@pytest.mark.parametrize("compiled", ["step = torch.compile(model)", "model.compile(); step = model"])
def test_fsdp2_without_adoption_is_planned_as_if_adopted(script, compiled):
    path = script()
    theirs = path.read_text().replace("overlapc.fully_shard", "fully_shard").replace("import overlapc", FSDP2)
    path.write_text(theirs.replace('step = torch.compile(model, backend="inductor")', compiled))
    report, assumed = plan_script(path, ["1"], 16, 8, Config.of(FEW_PASSES))
    assert assumed == ["FSDP2 is adopted, as by model = overlapc.adopt_fsdp2(model)"]
    assert {row.op for graph in report.steps[0].graphs for row in graph.collectives} == {"all_gather", "reduce_scatter"}
    assert len(report.steps[0].graphs) == 2, "one forward, one backward"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ('options={"passes": "none", "memory_budget": "1GiB", "guard_filter_fn": overlapc.trust_modules}',
         "options of the script: passes='none'"),
        ('options=overlapc.Config(passes="none")', "options of the script: passes=()"),
        ('mode="max-autotune"', "options of the script: mode='max-autotune'"),
    ],
)  # fmt: skip
def test_a_script_is_planned_with_its_own_options_unless_the_command_overrides_them(script, monkeypatch, given, shown):
    monkeypatch.setenv("OVERLAPC_PASSES", "sink_waits")  # weaker than options, stronger than a mode
    path = script()
    path.write_text(path.read_text().replace('backend="inductor"', f'backend="overlapc", {given}'))
    report, assumed = plan_script(path, ["1"], 4, 4, Config(**H200, memory_budget="2GiB"))
    assert assumed == [shown]
    graph = report.steps[0].graphs[0]
    assert graph.budget_bytes == 2 * 2**30
    assert [row.name for row in graph.passes] == (["sink_waits"] if "mode" in given else [])


@pytest.mark.parametrize(
    ("optimizers", "state", "update_numbers"),
    [
        ("torch.optim.AdamW(parameters)", {"AdamW": 2}, 3 + 2),  # gradients, state, and a square root per parameter
        ("torch.optim.AdamW(parameters, fused=True)", {"AdamW": 2}, 2 + 2),
        ("torch.optim.SGD(parameters)", {"SGD": 0}, 2),
        ("torch.optim.SGD(parameters[:4], momentum=0.5), torch.optim.Adagrad(parameters[4:])",
         {"SGD": 0.5, "Adagrad": 0.5}, 3 + 2 * 0.5),
    ],
)  # fmt: skip
def test_the_state_of_optimizers_counts_in_the_peak(tmp_path, optimizers, state, update_numbers):
    path = tmp_path / "train.py"
    path.write_text(STATE.replace("{optimizers}", optimizers))
    report, assumed = plan_script(path, [], 1, 1, Config.of({**H200, "passes": "none"}))
    (step,) = report.steps
    assert assumed == []
    parameters_bytes = 8 * 1024 * 4
    steps_bytes = 8 * 4  # the step count of each parameter
    assert step.optimizer_bytes == {
        name: pytest.approx(times * parameters_bytes, abs=steps_bytes) for name, times in state.items()
    }
    assert step.update_peak_bytes == pytest.approx(update_numbers * parameters_bytes, abs=3 * steps_bytes)
    if any(state.values()):
        assert step_peak_bytes(step) > step_peak_bytes(replace(step, optimizer_bytes={}, update_peak_bytes=0))
        assert f"of it is the state of {' and '.join(sorted(state))}" in str(report)
    else:
        assert "SGD keeps no state" in str(report)


def test_an_optimizer_that_cannot_step_is_named(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(STATE.replace("{optimizers}", "Guarded(parameters)"))
    report, assumed = plan_script(path, [], 1, 1, Config.of({**H200, "passes": "none"}))
    assert assumed == ["optimizer state is not counted for Guarded: AssertionError: no learning rate"]
    assert report.steps[0].optimizer_bytes == {}
    assert "optimizer state is not included" in str(report)


@pytest.mark.parametrize(
    "first",
    [
        "block.compile(); fully_shard(block)",
        "fully_shard(block); block.compile()",
        "model[list(model).index(block)] = compiled = torch.compile(block); fully_shard(compiled)",
    ],
)
def test_blocks_that_are_compiled_one_by_one_within_fsdp2_are_planned_as_one_graph(tmp_path, first):
    path = tmp_path / "train.py"
    path.write_text(BY_BLOCKS.replace("{first}", first))
    report, assumed = plan_script(path, [], 16, 8, Config.of({**H200, "passes": "none"}))
    assert assumed == [
        "FSDP2 is adopted, as by model = overlapc.adopt_fsdp2(model)",
        "2 modules that the script compiles one by one are planned with the FSDP2 module around them as one graph,"
        " because their own graphs contain no communication",
    ]
    (step,) = report.steps
    assert [(graph.name.split("_")[0], times) for graph, times in step.called] == [("forward", 1), ("backward", 1)]
    rows = [row for graph in step.graphs for row in graph.collectives]
    assert {row.origin.split(".")[0] for row in rows} == {"0", "1", "2"}, "two blocks, and the head outside of them"
    assert {row.op for row in rows} == {"all_gather", "reduce_scatter"}


def test_fsdp2_modules_that_a_compiled_function_calls_are_named_as_missing(tmp_path):
    path = tmp_path / "train.py"
    called = BY_BLOCKS.replace("{first}", "fully_shard(block)")
    called = called.replace("model(torch", "torch.compile(lambda x: model(x).sin())(torch")
    path.write_text(called)
    _, assumed = plan_script(path, [], 16, 8, Config.of({**H200, "passes": "none"}))
    assert assumed == [
        "FSDP2 modules that a compiled function calls are not in the plan, because FSDP2's hooks break its graph:"
        " compile the model itself, or call model = overlapc.adopt_fsdp2(model) before"
    ]
    adopted = called.replace("fully_shard(model)", "fully_shard(model); import overlapc; overlapc.adopt_fsdp2(model)")
    path.write_text(adopted)
    report, assumed = plan_script(path, [], 16, 8, Config.of({**H200, "passes": "none"}))
    assert assumed == []
    assert all(graph.collectives for graph in report.steps[0].graphs)


def test_an_optimizer_calls_its_closure_once(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(CLOSURE)
    report, assumed = plan_script(path, [], 1, 1, Config.of({**H200, "passes": "none"}))
    assert assumed[0] == "LBFGS.step calls its closure once"
    assert [times for _, times in report.steps[0].called] == [1, 1]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (
            "if loss > 2: print('large')",
            r"train.py: .*train.py:\d+: DataDependent.*\n   if loss > 2.*\nhint: a branch or a shape depends",
        ),
        ("sys.exit(3)", "ended with 3 before its first optimizer stepped"),
    ],
)
def test_an_error_in_a_script_is_named_with_its_line(script, more, says):
    with pytest.raises(ConfigError, match=says):
        plan_script(script(more), ["0" if "exit" in more else "1"], 8, 8, Config.of(H200))
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"passes": "sink_wait"}, ConfigError, r"train.py: \S+train.py:\d+: no pass named 'sink_wait'; nearest.*\Z"),
        ({"memory_budget": "1KiB"}, MemoryBudgetError, r"\Aforward_\d+: memory_budget leaves 1KiB"),
    ],
)
def test_an_error_of_overlapc_in_a_script_keeps_its_class_and_its_own_hint(script, options, kind, says):
    with pytest.raises(kind, match=says):
        plan_script(script(), ["1"], 4, 4, Config(**FEW_PASSES | options))


def test_a_syntax_error_is_shown_where_it_is(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("x = 1\ndef f(:\n")
    with pytest.raises(ConfigError, match=r'train.py:\n  File ".*train.py", line 2\n    def f\(:\n +\^\nSyntaxError'):
        plan_script(path, [], 1, 1, Config())


FABRIC = """
import functools, sys
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
if not torch.fabric_is_imported:
    def capture(compile):
        @functools.wraps(compile)
        def call(model, **how):
            compiled = compile(model, **how)
            compiled._how = how
            return compiled
        return call
    torch.compile, torch.fabric_is_imported = capture(torch.compile), True
torch.distributed.init_process_group("nccl")
compiled = torch.compile(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)))
model, how = compiled._orig_mod, compiled._how
fully_shard(model)
model = torch.compile(model, **how)
model(torch.ones(4, 64, device="cuda")).sum().backward()
torch.optim.SGD(model.parameters()).step()
"""
WIDTHS = """
import sys
import torch
from torch import nn
width = int(sys.argv[1])
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, width))
    def forward(self, x):
        return (x @ self.weight).view(4, width).sum()
model = Model()
step = torch.compile(model, backend="overlapc")
step(torch.ones(4, width)).backward()
torch.optim.SGD(model.parameters()).step()
"""


def test_a_plan_says_which_attention_runs_and_times_no_kernels(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(
        "import torch\nfrom torch.nn import functional as F\n"
        "w = torch.ones(1, 2, 128, 64, device='cuda', requires_grad=True)\n"
        "optimizer = torch.optim.SGD([w], lr=0.1)\n"
        "@torch.compile\n"
        "def step(w, mask):\n"
        "    return F.scaled_dot_product_attention(w.sin(), w.cos(), w.exp(), attn_mask=mask).square().mean()\n"
        "step(w, torch.rand(128, 128, device='cuda') > 0.5).backward()\noptimizer.step()\n"
    )
    torch._dynamo.utils.counters.clear()
    report, _ = plan_script(path, [], 1, 1, Config.of({**H200, "benchmark_fusion": "1", "matmul": "autotune"}))
    forward, backward = report.steps[0].graphs
    assert [list(graph.attention.values()) for graph in (forward, backward)] == [[1], [1]]
    assert "attention of [1, 2, 128, 64] float32" in str(report)
    assert counted("attention_masks_kept") == 1
    assert not counted("kernel_compiles")
    assert not counted("file_compiles")


def test_modules_beside_a_script_are_imported_anew_for_each_plan(tmp_path):
    """A module beside the script imports functions of torch by name and stores the number of ranks."""
    (tmp_path / "ranks_of_this.py").write_text(
        "from torch.distributed import get_world_size, init_process_group\n"
        "init_process_group('nccl')\nranks = get_world_size()\n"
    )
    path = tmp_path / "train.py"
    path.write_text("import ranks_of_this\n" + WIDTHS.replace("sys.argv[1]", "ranks_of_this.ranks"))
    for ranks in (4, 16):
        report, _ = plan_script(path, [], ranks, 8, Config.of({**H200, "passes": "none"}))
        assert f"input : {human_bytes(4 * ranks * ranks)}" in " ".join(report.steps[0].graphs[0].schedule.split())
    assert "ranks_of_this" not in sys.modules


def test_a_model_that_is_compiled_again_after_sharding_is_planned_in_a_sweep(tmp_path, monkeypatch):
    """As with Lightning Fabric, which replaces torch.compile by its own function when it is first imported."""
    path = tmp_path / "train.py"
    path.write_text(FABRIC)
    monkeypatch.setattr(torch, "compile", torch.compile)  # so that it is restored after the test
    monkeypatch.setattr(torch, "fabric_is_imported", False, raising=False)
    for ranks in (8, 16):
        report, assumed = plan_script(path, [], ranks, 8, Config.of({**H200, "passes": "none"}))
        assert assumed == ["FSDP2 is adopted, as by model = overlapc.adopt_fsdp2(model)"]
        rows = [row for graph in report.steps[0].graphs for row in graph.collectives]
        assert {(row.op, row.ranks) for row in rows} == {("all_gather", ranks), ("reduce_scatter", ranks)}


def test_each_plan_of_a_script_has_its_own_globals(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(WIDTHS)
    for width in ("8", "16"):
        report, assumed = plan_script(path, [width], 8, 8, Config.of(H200))
        assert len(report.steps[0].graphs) == 2, "one forward, one backward of the width of this plan"
        assert [line.split(",")[0] for line in assumed] == ["no communication between 8 ranks"]


def test_a_script_may_remove_the_variables_of_its_launcher(script, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.delenv("MASTER_PORT", raising=False)
    plan_script(script("del os.environ['RANK'], os.environ['MASTER_PORT']"), ["1"], 4, 4, Config.of(FEW_PASSES))
    assert os.environ["RANK"] == "3"
    assert "MASTER_PORT" not in os.environ


def test_a_script_builds_its_model_on_the_meta_device():
    _device_constructors.cache_clear()  # as in a new process
    with gpus(world_size=2, per_host=2), torch.device("meta"):
        assert {made.device.type for made in (torch.empty(1), torch.tensor([1.0]), torch.nn.Linear(2, 2).weight)} == {
            "meta"
        }
    with torch.device("meta"):
        assert torch.get_default_device().type == "meta", "this process is as before"


# Cuts batches out of the data and asks for a GPU as nanoGPT does. The optimizer is freed when `main` returns.
CUT_DATA = """
import numpy as np, torch
from torch import nn
def main():
    device = "cuda" if torch.cuda.is_available() and torch.cuda.get_device_properties(0).total_memory else "cpu"
    data = np.zeros(1000, dtype=np.uint16)
    starts = torch.randint(len(data) - 32, (4,){more})
    rows = torch.stack([torch.from_numpy(data[i : i + 32].astype(np.int64)) for i in starts]).pin_memory()
    with torch.cuda.stream(torch.cuda.Stream()):
        rows = rows.to(device, non_blocking=True)
    rows.record_stream(torch.cuda.current_stream())
    model = nn.Sequential(nn.Embedding(64, 32), nn.Linear(32, 64)).to(device)
    nn.init.trunc_normal_(model[1].weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters())
    assert torch.cuda.is_available(), "it chose the GPU above"
    torch.compile(model)(rows).sum().backward()
    optimizer.step()
main()
"""


def test_a_batch_cut_out_of_data_at_random_indices_has_its_size(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(CUT_DATA.replace("{more}", ""))
    report, assumed = plan_script(path, [], 1, 1, Config.of({**H200, "passes": "none"}))
    (step,) = report.steps
    assert assumed == []
    (product,) = (node for node in parse(step.graphs[0].schedule).nodes if node.op == "addmm")
    assert product.work.flops == 2 * 4 * 32 * 32 * 64
    assert step.optimizer_bytes["AdamW"] == pytest.approx(2 * 4 * (64 * 32 + 32 * 64 + 64), abs=64)
    path.write_text(CUT_DATA.replace("{more}", ", device=device"))
    with pytest.raises(ConfigError, match=r"no elements.*one of them is a size: \S+train.py:8\nhint"):
        plan_script(path, [], 1, 1, Config.of({**H200, "passes": "none"}))


def test_a_script_that_compiles_nothing_says_so(script):
    with pytest.raises(ConfigError, match=r"needs torch.compile\(model\)"):
        plan_script(script(), ["0"], 8, 8, Config.of(H200))


def test_hardware_options_change_the_profile_and_are_validated(tmp_path):
    _, profile = hardware("h200-nvlink", 4, "50GB/s", tmp_path)
    assert (profile.ranks_per_host, profile.network_link.bytes_per_s) == (4, 50e9)
    with pytest.raises(ConfigError, match="network like 400Gb/s or 50GB/s"):
        hardware("h200-nvlink", 0, "fast", tmp_path)
    with pytest.raises(ConfigError, match="--gpus-per-host -1: write a number"):
        hardware("h200-nvlink", -1, "", tmp_path)


NOT_OURS = {
    "huggingface.py": "--width 32 --heads 4 --layers 2 --vocabulary 64 --batch 1 --seq 16",
    "tensor_parallel.py": "--width 32 --heads 4 --layers 2 --vocabulary 64 --seq 16",
    "vision.py": "--width 8 --blocks 1 1 1 1 --side 32 --batch-size 4",
}


@pytest.mark.parametrize("name", NOT_OURS)
def test_typical_training_scripts_are_planned_without_graph_breaks(name):
    if name == "huggingface.py":
        pytest.importorskip("transformers", reason="needs transformers")
    path = ROOT / "tests" / "launch" / "scripts" / name
    # torch.testing, which other tests in this process import, forbids setting flags of cuDNN, as the script does.
    with torch.backends.__allow_nonbracketed_mutation():
        report, assumed = plan_script(path, NOT_OURS[name].split(), 16, 8, Config.of(FEW_PASSES))
    (step,) = report.steps
    assert assumed == []
    assert not step.breaks
    assert [(graph.name.split("_")[0], times) for graph, times in step.called] == [("forward", 1), ("backward", 1)]
    assert not [graph.unknown for graph in step.graphs if graph.unknown]
    groups = {(row.group, row.ranks) for graph in step.graphs for row in graph.collectives}
    assert (
        groups
        == {
            "huggingface.py": {("dp", 16)},
            "tensor_parallel.py": {("dp_shard", 8), ("tp", 2)},
            "vision.py": {("replicate", 16)},
        }[name]
    )
    forward = parse(step.graphs[0].schedule)
    products = [node for node in forward.nodes if node.op in ("mm", "addmm", "convolution")]
    assert len(products) >= 10
    assert {node.work.dtype for node in products if node.work} == {"bfloat16"}, (
        "products must be in the dtype of the policy or of autocast"
    )
