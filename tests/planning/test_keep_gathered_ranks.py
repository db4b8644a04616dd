"""With a memory budget that has room, ranks keep parameters gathered for backward: the same ones, and the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overlapc
from overlapc.report import record
from overlapc.runtime.counters import counted
from tests.parallel.tiny import Tiny, batch
from tests.planning.test_last_batch_ranks import batches, losses_of_one_process, model, steps_of
from tests.ranks import values_on_ranks

KEPT = "gathers_kept_for_backward"
LARGE = "1GiB"
QUICK = {"native": False, "profile": "cpu-gloo", "passes": "raise_collectives,sink_waits", "rank_timeout": 60.0}


def one_step(mesh: DeviceMesh, cache: str, ac: str = "", tied: bool = False, **options: Any) -> dict[str, Any]:
    """Loss, gradients and what was compiled for one step of a sharded model on this rank."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    record.clear()
    torch.manual_seed(0)
    sharded = Tiny(dim=64, hidden=256, layers=3, ac=ac, tied=tied).to(mesh.device_type)
    for layer in sharded.layers:
        overlapc.fully_shard(layer, mesh)
    overlapc.fully_shard(sharded, mesh, reshard_after_forward=True)
    options = {**QUICK, "cache_dir": f"{cache}/{dist.get_rank()}", "check_lifecycle": True, **options}
    step = torch.compile(sharded, backend="overlapc", options=options, fullgraph=True)
    loss = step(*(rows.chunk(2)[dist.get_rank()].to(mesh.device_type) for rows in batch(4)))
    loss.backward()
    forward, backward = record.report_of_process().steps[0].graphs
    return {
        "loss": loss.item(),
        "gradients": [p.grad.to_local().cpu() for p in sharded.parameters()],
        "gathered again": sum("all_gather" in row.op for row in backward.collectives),
        "kept": counted(KEPT),
        "planned": counted("choice_compiles"),
        "step_ns": forward.after.step_ns + backward.after.step_ns,
        "peak": max(forward.peak_bytes, backward.peak_bytes),
        "collectives": [row.name for row in backward.collectives],
        "via": {row.via for row in (*forward.collectives, *backward.collectives)},
    }


def cases(cache: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    found = {
        "without": one_step(mesh, f"{cache}/a"),
        "budget": one_step(mesh, f"{cache}/b", memory_budget=LARGE, warm_start=True),
    }
    between = (found["without"]["peak"] + found["budget"]["peak"]) // 2
    found["some"] = one_step(mesh, f"{cache}/b", memory_budget=between)
    found["again"] = one_step(mesh, f"{cache}/b", memory_budget=LARGE, warm_start=True)
    found["off"] = one_step(mesh, f"{cache}/b", memory_budget=LARGE, keep_gathered=False)
    found["checkpoint without"] = one_step(mesh, f"{cache}/c", "around", tied=True)
    found["checkpoint budget"] = one_step(mesh, f"{cache}/c", "around", tied=True, memory_budget=LARGE)
    return {**found, **by_copies(cache)}


def by_copies(cache: str, device: str = "cpu") -> dict[str, Any]:
    """The same with collectives by copies, without a budget and with one."""
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("dp",))
    options = {"transport": "copy", "check_lifecycle": False}
    return {
        "copies without": one_step(mesh, f"{cache}/d", **options),
        "copies budget": one_step(mesh, f"{cache}/d", memory_budget=LARGE, **options),
    }


def test_ranks_keep_the_same_parameters_and_compute_the_same(tmp_path: Path) -> None:
    ranks = values_on_ranks(cases, 2, str(tmp_path), timeout_s=240)
    for seen in ranks:
        for name in ("", "checkpoint "):
            check_kept(seen[f"{name}without"], seen[f"{name}budget"])
        check_copies(seen)
        some = seen["some"]
        assert 0 < some["gathered again"] < seen["without"]["gathered again"]
        assert seen["budget"]["step_ns"] <= some["step_ns"] <= seen["without"]["step_ns"]
        assert all(map(torch.equal, some["gradients"], seen["without"]["gradients"]))
        assert seen["again"]["planned"] == 0 < seen["budget"]["planned"]
        assert seen["again"]["collectives"] == seen["budget"]["collectives"]
        assert seen["off"]["kept"] == 0
    one, other = ranks
    assert all(one[case]["collectives"] == other[case]["collectives"] for case in one)


def check_kept(without: dict[str, Any], budget: dict[str, Any]) -> None:
    """What is kept with a budget, on one rank, and that it changes nothing but that."""
    assert without["kept"] == 0 < without["gathered again"]
    assert budget["gathered again"] == 0 < budget["kept"]
    assert budget["loss"] == without["loss"]
    assert all(map(torch.equal, without["gradients"], budget["gradients"]))
    assert budget["step_ns"] < without["step_ns"]


def check_copies(seen: dict[str, Any]) -> None:
    """seen: `by_copies` on one rank."""
    check_kept(seen["copies without"], seen["copies budget"])
    assert seen["copies without"]["via"] == seen["copies budget"]["via"] == {"copy"}


def smaller_batch(cache: str) -> tuple[list[float], list[int], int]:
    """Three steps; the second is of another size on this rank alone."""
    torch.set_num_threads(1)
    torch._dynamo.utils.counters.clear()
    sharded = model()
    for each in sharded:
        overlapc.fully_shard(each)
    overlapc.fully_shard(sharded)
    options = {**QUICK, "cache_dir": f"{cache}/{dist.get_rank()}", "memory_budget": LARGE}
    return *steps_of(sharded, batches()[:2], options), counted(KEPT)


def test_a_rank_that_compiles_again_by_itself_keeps_what_was_chosen(tmp_path: Path) -> None:
    want = losses_of_one_process(batches()[:2])
    ranks = values_on_ranks(smaller_batch, 2, str(tmp_path), timeout_s=240)
    assert all(kept > 0 for _, _, kept in ranks)
    assert [alone[-1] > 0 for _, alone, _ in ranks] == [False, True]
    losses = [sum(pair) / 2 for pair in zip(*(losses for losses, _, _ in ranks), strict=True)]
    assert all(abs(a - b) < 1e-4 * abs(b) for a, b in zip(losses, want, strict=True))
