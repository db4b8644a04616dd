"""FSDP written by a user with DTensors, on real ranks, alone and around tensor parallelism: results equal eager's, and
collectives are bucketed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from overlapc.report import record
from tests.parallel.tiny import Tiny, batch, fsdp_with_dtensors, tensor_parallel
from tests.ranks import values_on_ranks


def trained(compiled: bool, dtype: torch.dtype, mesh: DeviceMesh) -> tuple[list[float], list[torch.Tensor]]:
    """Return the losses of three steps and this rank's shards of the last gradients."""
    torch.manual_seed(0)
    model = Tiny(dim=16, hidden=32)
    if mesh["tp"].size() > 1:
        tensor_parallel(model, mesh["tp"])
    fsdp_with_dtensors(model, mesh["dp"], dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.compile(model, backend="overlapc", fullgraph=True) if compiled else model
    losses = []
    for number in range(3):
        optimizer.zero_grad()
        tokens, targets = (each.roll(number + mesh["dp"].get_local_rank(), 0) for each in batch(4, 6))
        loss = step(tokens, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [param.grad.to_local() for param in model.parameters()]


def beside_eager(tp: int) -> dict[str, Any]:
    # One mesh for all models: torch's cache of DTensor's rules mixes the groups of equal meshes.
    mesh = init_device_mesh("cpu", (dist.get_world_size() // tp, tp), mesh_dim_names=("dp", "tp"))
    seen: dict[str, Any] = {}
    for dtype in (torch.float32, torch.bfloat16):
        torch._dynamo.reset()
        record.clear()
        seen[str(dtype)] = (trained(False, dtype, mesh), trained(True, dtype, mesh))
    graphs = record.report_of_process().steps[0].graphs
    seen["launches"] = [sum(each.group != "tp" for each in graph.collectives) for graph in graphs]
    return seen


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "around tensor parallelism"])
def tp(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def seen(tp: int) -> list[dict[str, Any]]:
    return values_on_ranks(beside_eager, 2 * tp, tp, timeout_s=280)


@pytest.mark.parametrize(("dtype", "tolerance"), [("torch.float32", 1e-5), ("torch.bfloat16", 2e-2)])
def test_losses_and_gradients_equal_eager(seen: list[dict[str, Any]], dtype: str, tolerance: float):
    for rank in seen:
        (losses, grads), (compiled_losses, compiled_grads) = rank[dtype]
        assert compiled_losses == pytest.approx(losses, rel=tolerance)
        for ours, eagers in zip(compiled_grads, grads, strict=True):
            assert (ours - eagers).norm() <= tolerance * eagers.norm() + 1e-7


def test_collectives_of_parameters_are_launched_in_buckets(seen: list[dict[str, Any]]):
    assert len(seen[0]["launches"]) == 2
    assert all(1 <= launches <= 6 for launches in seen[0]["launches"])  # for 14 parameters
