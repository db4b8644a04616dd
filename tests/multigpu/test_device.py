"""A graph runs on the GPU of its tensors whatever the current device is: kernels, memory and streams."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def step(x: Tensor, weight: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(x, (64,), weight) @ weight.outer(weight) + x


@pytest.mark.parametrize("compiled_on", [0, 1])
def test_a_graph_runs_on_the_gpu_of_its_tensors(compiled_on: int, tmp_path: Path):
    """The graph is compiled with one current device and called with others."""
    for home in (0, 1):
        torch._dynamo.reset()
        run = torch.compile(step, backend="overlapc", options={"cache_dir": str(tmp_path)})
        # float64, because where terms cancel, float32 sums in another order than eager's differ visibly.
        x = torch.randn(32, 64, device=f"cuda:{home}", dtype=torch.float64, requires_grad=True)
        weight = torch.randn(64, device=f"cuda:{home}", dtype=torch.float64, requires_grad=True)
        for current in (compiled_on, 0, 1):
            with torch.cuda.device(current):
                results = torch.autograd.grad(run(x, weight).sum(), (x, weight))
                assert torch.cuda.current_device() == current
                expected = torch.autograd.grad(step(x, weight).sum(), (x, weight))
            torch.testing.assert_close(results, expected)


def test_kernels_follow_the_current_stream(tmp_path: Path):
    """A delayed chain on a side stream gives the same result as on the default stream."""
    run = torch.compile(step, backend="overlapc", options={"cache_dir": str(tmp_path)})
    x, weight = torch.randn(32, 64, device="cuda"), torch.randn(64, device="cuda")
    expected = run(x, weight)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        late = torch.zeros_like(x).add_(x)
        result = run(late, weight)
    side.synchronize()
    torch.testing.assert_close(result, expected)
