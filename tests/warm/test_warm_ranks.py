"""Ranks that start warm together with ranks that start cold do not hang, and all run the same order."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import overlapc
from overlapc.runtime.counters import counted
from tests.caches import cache_of_rank
from tests.ranks import values_on_ranks

COUNTERS = ("graph_compiles", "kernel_compiles", "graph_cache_hits", "graphs", "steps_from_cache")


def starts(root: str, transport: str, device: str = "cpu") -> list[dict[str, Any]]:
    """Compile and train in four starts: cold, warm, warm on rank 0 only, and warm again."""
    from overlapc.launch.llama import Llama, LlamaConfig

    rank = dist.get_rank()
    cache = Path(cache_of_rank(root))
    mesh = dist.device_mesh.init_device_mesh(device, (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Llama(replace(LlamaConfig.tiny(), layers=1)).to(device)
    for layer in model.layers:
        overlapc.fully_shard(layer, mesh=mesh)
    overlapc.fully_shard(model, mesh=mesh)
    tokens = torch.randint(0, 64, (1, 16)).to(device)
    seen = []
    for start in ("cold", "warm", "mixed", "warm"):
        if start == "mixed" and rank == 1:
            shutil.rmtree(cache / "graphs")
        torch._dynamo.reset()
        before = {name: counted(name) for name in COUNTERS}
        options = {"cache_dir": str(cache), "warm_start": True, "rank_timeout": 60, "transport": transport}
        compiled = torch.compile(model, backend="overlapc", options=options)
        for _ in range(2):  # the first step runs in AOTAutograd's wrapper, the second without it
            model.zero_grad(set_to_none=True)
            loss = compiled(tokens, tokens)
            loss.backward()
        grads = [parameter.grad.to_local().to("cpu", copy=True) for parameter in model.parameters()]
        model.zero_grad(set_to_none=True)
        seen.append({"loss": loss.item(), "grads": grads, **{name: counted(name) - before[name] for name in COUNTERS}})
    return seen


@pytest.mark.parametrize("transport", ["nccl", "copy"])
def test_ranks_use_cached_graphs_together_or_not_at_all(transport: str, tmp_path: Path):
    check_starts(values_on_ranks(starts, 2, str(tmp_path), transport, timeout_s=240))


def check_starts(outcomes: list[list[dict[str, Any]]]) -> None:
    """Assert the outcomes of `starts`."""
    first, second = outcomes
    for seen in (first, second):
        cold, warm, mixed, again = seen
        assert cold["graph_compiles"] == cold["graphs"] == 2
        assert (warm["graph_compiles"], warm["kernel_compiles"], warm["graphs"]) == (0, 0, 2)
        assert mixed["graphs"] == 2
        assert again["graph_compiles"] == 0
        assert [start["steps_from_cache"] for start in seen] == [0, 1, 0, 1]
        for start in (warm, mixed, again):
            assert start["loss"] == cold["loss"]
            assert all(torch.equal(a, b) for a, b in zip(start["grads"], cold["grads"], strict=True))
    assert first[2]["graph_cache_hits"] == 2  # rank 0 found the graphs, but compiled together with rank 1
    assert second[2]["graph_compiles"] == 2


def divided_start(root: str) -> dict[str, Any]:
    """Run a training step on four ranks as if on two hosts, with groups divided within and across hosts."""
    torch.set_num_threads(1)
    mesh = dist.device_mesh.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = overlapc.fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
    options = {"cache_dir": cache_of_rank(root), "warm_start": True, "transport": "copy", "ranks_per_host": 2}
    step = torch.compile(model, backend="overlapc", options=options)
    loss = step(torch.arange(16.0).view(2, 8) + dist.get_rank()).square().mean()
    loss.backward()
    grads = [parameter.grad.to_local() for parameter in model.parameters()]
    return {"loss": loss.item(), "grads": grads, **{name: counted(name) for name in COUNTERS}}


def test_another_job_uses_the_cached_step_of_groups_of_several_hosts(tmp_path: Path):
    cold, warm = (values_on_ranks(divided_start, 4, str(tmp_path)) for _ in range(2))
    for before, after in zip(cold, warm, strict=True):
        assert (before["steps_from_cache"], before["graph_compiles"]) == (0, 2)
        assert (after["steps_from_cache"], after["graph_compiles"]) == (1, 0)
        assert after["loss"] == before["loss"]
        assert all(map(torch.equal, after["grads"], before["grads"]))


def local_start(root: str) -> tuple[list[float], int]:
    """Compile a function of DTensors that does not communicate on rank 0 alone, in two starts."""
    from torch.distributed.tensor import DTensor, Shard

    mesh = dist.device_mesh.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    given = DTensor.from_local(torch.arange(4.0) + dist.get_rank(), mesh, [Shard(0)], run_check=False)
    options = {"cache_dir": cache_of_rank(root), "warm_start": True, "rank_timeout": 20}
    seen = []
    for _ in range(2 if dist.get_rank() == 0 else 0):
        torch._dynamo.reset()
        compiled = torch.compile(lambda x: (x * 2).to_local().sum(), backend="overlapc", options=options)
        for _ in range(2):
            given = given.detach().requires_grad_()
            loss = compiled(given)
            loss.backward()
            seen.append(loss.item() + given.grad.to_local().sum().item())
    dist.barrier()
    return seen, counted("steps_from_cache")


def test_a_function_of_dtensors_that_does_not_communicate_may_run_on_one_rank_alone(tmp_path: Path):
    first, second = values_on_ranks(local_start, 2, str(tmp_path), timeout_s=120)
    assert first == ([20.0] * 4, 1)
    assert second == ([], 0)
