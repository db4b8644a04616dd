"""`autotune` on a real GPU: steps equal eager's, and later processes use the stored measurements without compiling."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from overlapc.report import record
from overlapc.runtime.counters import counted
from tests.ranks import on_gpus, take_gpu, values_on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# Runs in a new process each time, as a later job would.
SCRIPT = """
import sys, torch, torch.nn.functional as F, triton
from overlapc.report.record import report_of_process

compiled_kernels = []
triton.knobs.compilation.listener = lambda *, cache_hit, **rest: compiled_kernels.append(not cache_hit)

def step(x, weight, table, tokens, targets, total):
    total.add_(x.float().sum(0))
    hidden = F.rms_norm(x + F.embedding(tokens, table), (x.shape[1],), weight)
    return F.cross_entropy(hidden.float() * 3, targets), hidden.t().contiguous()

torch.manual_seed(0)
cuda = {"device": "cuda"}
x, table = (torch.randn(rows, 4096, dtype=torch.bfloat16, **cuda) for rows in (1000, 500))
x.requires_grad_()
weight = torch.rand(4096, dtype=torch.bfloat16, requires_grad=True, **cuda)
tokens, targets = (torch.randint(0, most, (1000,), **cuda) for most in (500, 4096))
results = []
options = {"autotune": True, "cache_dir": sys.argv[1], "warm_start": sys.argv[2] == "warm"}
tuned = torch.compile(step, backend="overlapc", options=options)
for run in (step, tuned):
    total = torch.zeros(4096, **cuda)
    loss, turned = run(x, weight, table, tokens, targets, total)
    gradients = torch.autograd.grad([loss, turned], [x, weight], [torch.ones_like(loss), torch.ones_like(turned)])
    results.append([loss, turned, total, *gradients])
for found, expected in zip(*results):
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert error < 1e-2, error
counters = torch._dynamo.utils.counters["overlapc"]
summaries = [graph.tuned for graph in report_of_process().steps[0].graphs]
print("\\n".join(summaries), file=sys.stderr)
print(counters["tilings_timed"], sum(compiled_kernels), len([each for each in summaries if each]))
"""


def run(folder: Path, warm: str) -> list[int]:
    """Run SCRIPT; return the numbers of tilings timed, of kernels compiled, and of graphs with a tuning summary."""
    command = [sys.executable, "-c", SCRIPT, str(folder), warm]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stderr[-3000:])
    return [int(word) for word in done.stdout.split()]


def test_a_later_process_measures_and_compiles_nothing(tmp_path: Path):
    timed, _, graphs = run(tmp_path, "cold")
    assert timed > 10
    assert graphs == 2
    assert run(tmp_path, "warm") == [0, 0, 2]  # the cold run cached no graphs: planned again with the times on disk
    assert run(tmp_path, "warm") == [0, 0, 2]  # whole graphs from the cache


def sharded_steps(root: str) -> list[dict[str, Any]]:
    """Compile a training step under FSDP twice: cold, and after rank 1 has lost its cached tilings and graphs."""
    import overlapc
    from overlapc.codegen.triton import candidates
    from overlapc.launch.llama import Llama, LlamaConfig

    candidates.MOST = 2  # tilings per kernel: this tests how ranks divide the measurements, not their results
    take_gpu()
    rank = dist.get_rank()
    cache = Path(root) / str(rank)  # one per rank, as on different hosts
    mesh = dist.device_mesh.init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Llama(LlamaConfig(dim=1024, layers=1, heads=8, kv_heads=4, ffn=2048, vocab=8192, max_seq=1024))
    model.reset_parameters(0)
    for layer in (*model.layers, model):
        overlapc.fully_shard(layer, mesh=mesh)
    tokens = torch.randint(0, 8192, (2, 1024), device="cuda")
    options = {
        "autotune": True,
        "cache_dir": str(cache),
        "autotune_seconds": 30,
        "rank_timeout": 60,
        "warm_start": True,
        "transport": "nccl",  # with copies, ranks have different kernels for sums, which only one rank measures
    }
    seen = []
    for start in ("cold", "lost"):
        if start == "lost" and rank == 1:
            shutil.rmtree(cache / "tilings")
            shutil.rmtree(cache / "graphs")
        torch._dynamo.reset()
        record.clear()
        timed = counted("tilings_timed")
        step = torch.compile(model, backend="overlapc", options=options)
        loss = step(tokens, tokens)
        loss.backward()
        grads = [parameter.grad.to_local().cpu() for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        graphs = record.report_of_process().steps[0].graphs
        seen.append(
            {
                "loss": loss.item(),
                "grads": grads,
                "timed": counted("tilings_timed") - timed,
                "tuned": [graph.tuned for graph in graphs],
                "schedules": [graph.schedule for graph in graphs],
            }
        )
    return seen


def test_ranks_choose_the_same_tilings(tmp_path: Path):
    first, second = values_on_ranks(sharded_steps, 2, str(tmp_path), timeout_s=110, **on_gpus(2))
    for one, other in zip(first, second, strict=True):
        assert one["tuned"] == other["tuned"]  # including the measured times, to the last digit
        assert one["schedules"] == other["schedules"]
        print(one["tuned"], one["timed"], other["timed"])
    for cold, again in (first, second):
        assert abs(cold["loss"] - again["loss"]) < 1e-3 * abs(cold["loss"])
        for one, other in zip(cold["grads"], again["grads"], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-4)
    assert first[0]["timed"] > 0
    assert second[0]["timed"] > 0  # the ranks divided the work
    assert first[1]["timed"] == 0
    assert second[1]["timed"] > 0
