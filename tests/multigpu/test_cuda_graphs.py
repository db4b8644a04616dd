"""CUDA graphs on real GPUs: steps equal those without graphs, and replays do not change earlier results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol

from overlapc.report import record
from overlapc.runtime.counters import counted
from tests.ranks import values_on_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


class Mlp(nn.Module):
    """Many small kernels and products; with `sorts`, also a call that synchronizes with the device (`eigvalsh`)."""

    def __init__(self, layers: int = 4, width: int = 64, sorts: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.sorts = sorts

    def forward(self, x: Tensor) -> Tensor:
        for at, layer in enumerate(self.layers):
            x = x + self.norm(torch.nn.functional.gelu(layer(x)))
            if self.sorts and at == 1:
                x = x + torch.linalg.eigvalsh((x.t() @ x).detach()) / 100
        return x.square().mean()


def steps(model: nn.Module, run: Any, count: int = 8) -> list[list[Tensor]]:
    """Return loss and gradients of every step (not copied); parameters are updated between steps."""
    found = []
    for step in range(count):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda()
        loss = run(x)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        found.append([loss, *gradients])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(gradient, alpha=0.01)
    return found


def both(tmp_path: Path, **how: Any) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Run the same steps without and with CUDA graphs."""
    found = []
    for graphs in (False, True):
        torch._dynamo.reset()
        record.clear()
        torch.manual_seed(0)
        model = Mlp(**how).cuda()
        options = {"cuda_graphs": graphs, "cache_dir": str(tmp_path), "measure_matmuls": False}
        found.append(steps(model, torch.compile(model, backend="overlapc", options=options)))
    return found[0], found[1]


@pytest.mark.parametrize("sorts", [False, True], ids=["one-part", "cut"])
def test_steps_with_captured_parts_equal_those_without(tmp_path: Path, sorts: bool):
    plain, captured = both(tmp_path, sorts=sorts)
    for ours, theirs in zip(captured, plain, strict=True):  # compared after all replays
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    graphs = record.report_of_process().steps[0].graphs
    print([graph.captured for graph in graphs])
    assert all("captured part" in graph.captured for graph in graphs)
    parts = counted("cuda_graph_parts")
    assert parts >= (3 if sorts else 2), "forward and backward have at least one part each"
    assert counted("cuda_graph_captures") >= parts, "each part must be captured"
    assert counted("cuda_graph_replays") >= parts, "each part must be replayed"


def _reduced(layers: int) -> tuple[float, int, int, list[str]]:
    """Run steps with an all-reduce per layer; return (largest error, captures, replays, report lines)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.cuda.set_device(rank)
    group = dist.group.WORLD
    weights = [torch.randn(64, 64, generator=torch.Generator().manual_seed(at)).cuda() / 8 for at in range(layers)]

    def function(x: Tensor) -> Tensor:
        for weight in weights:
            x = funcol.all_reduce((x @ weight).tanh(), "sum", group).sin()
        return x

    compiled = torch.compile(function, backend="overlapc", options={"cuda_graphs": True})
    worst = 0.0
    results = []
    for step in range(5):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step * world + rank)).cuda()
        results.append((compiled(x), function(x)))
    for ours, theirs in results:
        worst = max(worst, float((ours - theirs).abs().max()))
    graphs = record.report_of_process().steps[0].graphs
    return (
        worst,
        counted("cuda_graph_captures"),
        counted("cuda_graph_replays"),
        [graph.captured for graph in graphs],
    )


def test_collectives_over_nccl_are_captured():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}")
    for worst, captures, replays, captured in values_on_ranks(_reduced, 2, 3, timeout_s=120, backend="nccl"):
        assert worst < 1e-4
        assert captures >= 1
        assert replays >= 1
        assert "1 captured part" in captured[0], captured
        assert "NCCL" not in captured[0], captured
