"""Lightning Fabric's ModelParallelStrategy on two ranks: the recipe of docs/TRAINERS.md compared with a plain run."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from overlapc.runtime.counters import counted
from tests.parallel.sharded import shard
from tests.parallel.tiny import Tiny
from tests.ranks import values_on_ranks
from tests.trainers.recipes import furthest, needs, recipe

pytestmark = needs("lightning")

STEPS, MICRO = 10, 2


def plain(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return shard(model, mesh["data_parallel"], apply=fully_shard)  # type: ignore[arg-type]


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    return [tuple(torch.randint(24, (2, 6), generator=generator) for _ in range(2)) for _ in range(STEPS * MICRO)]  # type: ignore


def train(ours: bool, folder: Path, resume: bool) -> dict[str, list[float]]:
    """Train with accumulation, clipping and a checkpoint after half of the steps.

    resume: load that checkpoint and run only the second half.
    """
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    parallelize = recipe("Lightning Fabric")["parallelize"] if ours else plain
    strategy = ModelParallelStrategy(parallelize_fn=parallelize, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model = fabric.setup_module(Tiny())
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
    state = {"model": model, "optimizer": optimizer}
    if resume:
        fabric.load(folder, state)
    losses, unsynced = [], []
    for number, batch in enumerate(batches(fabric.global_rank)):
        if resume and number < STEPS * MICRO // 2:
            continue
        last = number % MICRO == MICRO - 1
        with fabric.no_backward_sync(model, enabled=not last):
            loss = model(*batch)
            fabric.backward(loss / MICRO)
        losses.append(loss.item())
        if not last:
            unsynced.append(float(any(param.grad is not None for param in model.parameters())))
            continue
        fabric.clip_gradients(model, optimizer, max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        if not resume and number == STEPS * MICRO // 2 - 1:
            fabric.save(folder, state)
    return {"losses": losses, "unsynced": unsynced}


def work(folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ours, resume in ((False, False), (True, False), (True, True)):
        if not resume:  # else it may use the graphs of the run that it continues
            torch._dynamo.reset()
        before = counted("collectives")
        with contextlib.redirect_stdout(None), contextlib.redirect_stderr(None):
            found[f"{ours}, {resume}"] = train(ours, Path(folder) / f"{ours}", resume)
        found[f"{ours}, {resume}"]["collectives"] = counted("collectives") - before
    return found


def prepare() -> None:
    from lightning.fabric import Fabric

    assert Fabric


def test_ten_steps_match_fabric_without_overlapc(tmp_path: Path):
    for outcome in values_on_ranks(work, 2, str(tmp_path), timeout_s=280, prepare=prepare):
        theirs, ours, resumed = outcome["False, False"], outcome["True, False"], outcome["True, True"]
        assert ours["collectives"] > 0
        assert furthest(ours["losses"], theirs["losses"]) < 1e-4
        assert furthest(resumed["losses"], ours["losses"][STEPS * MICRO // 2 :]) < 1e-4
        assert not any(ours["unsynced"]), "gradients of a micro-batch under no_backward_sync were reduced"
