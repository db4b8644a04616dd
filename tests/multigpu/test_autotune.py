"""`autotune` on a real GPU: steps equal eager's, and what was measured once is found again without compiling."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

# A process of its own each time, as a later job would be.
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
    """Tilings timed, kernels compiled in this process, graphs with a summary."""
    command = [sys.executable, "-c", SCRIPT, str(folder), warm]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    print(done.stderr[-3000:])
    return [int(word) for word in done.stdout.split()]


def test_a_later_process_measures_and_compiles_nothing(tmp_path: Path):
    timed, _, graphs = run(tmp_path, "cold")
    assert timed > 10
    assert graphs == 2
    assert run(tmp_path, "warm") == [0, 0, 2]  # graphs were not kept: planned anew with the times on disk
    assert run(tmp_path, "warm") == [0, 0, 2]  # taken whole
