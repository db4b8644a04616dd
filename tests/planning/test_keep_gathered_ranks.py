"""With room in the memory budget, all ranks keep the same parameters gathered for backward, and results are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import overlapc
from overlapc.agreement import rank_agreement
from overlapc.report import record
from overlapc.report.kept_gathered import gathered_lines
from overlapc.runtime.counters import counted
from tests.caches import cache_of_rank
from tests.parallel.tiny import Tiny, batch
from tests.planning.test_last_batch_ranks import batches, losses_of_one_process, model, steps_of
from tests.ranks import values_on_ranks

KEPT = "gathers_kept_for_backward"
LARGE = "1GiB"
WHY_REPEATED = {
    "without": "no memory_budget is set",
    "some": "memory_budget has no room for more",
    "off": "keep_gathered is off",
}
QUICK = {"native": False, "profile": "cpu-gloo", "passes": "raise_collectives,sink_waits", "rank_timeout": 60.0}


def one_step(mesh: DeviceMesh, cache: str, ac: str = "", tied: bool = False, **options: Any) -> dict[str, Any]:
    """Run one step of a sharded model; return this rank's loss, gradients, and what was compiled."""
    torch.set_num_threads(1)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    record.clear()
    torch.manual_seed(0)
    sharded = Tiny(dim=64, hidden=256, layers=2, ac=ac, tied=tied).to(mesh.device_type)
    for layer in sharded.layers:
        overlapc.fully_shard(layer, mesh)
    overlapc.fully_shard(sharded, mesh, reshard_after_forward=True)
    options = {**QUICK, "cache_dir": cache_of_rank(cache), "check_lifecycle": True, **options}
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
        "said": list(gathered_lines(record.report_of_process().steps[0])),
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
    """Run the step with collectives by copies, without and with a memory budget."""
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
        for name, why in WHY_REPEATED.items():
            assert any("are gathered again" in line and line.endswith(why) for line in seen[name]["said"]), name
        assert "memory_budget has room for them" in seen["budget"]["said"][0] == seen["again"]["said"][0]
        assert seen["again"]["planned"] == 0 < seen["budget"]["planned"]
        assert seen["again"]["collectives"] == seen["budget"]["collectives"]
        assert seen["off"]["kept"] == 0
    one, other = ranks
    assert all(one[case]["collectives"] == other[case]["collectives"] for case in one)


def check_kept(without: dict[str, Any], budget: dict[str, Any]) -> None:
    """Assert on one rank that parameters stay gathered only with a budget, with equal results and a shorter step."""
    assert without["kept"] == 0 < without["gathered again"]
    assert budget["gathered again"] == 0 < budget["kept"]
    assert budget["loss"] == without["loss"]
    assert all(map(torch.equal, without["gradients"], budget["gradients"]))
    assert budget["step_ns"] < without["step_ns"]


def check_copies(seen: dict[str, Any]) -> None:
    """Assert the results of `by_copies` on one rank."""
    check_kept(seen["copies without"], seen["copies budget"])
    assert seen["copies without"]["via"] == seen["copies budget"]["via"] == {"copy"}


def rows_of_rank(seed: int, rows: int) -> list[Tensor]:
    """Return this rank's tokens and targets, with the number of rows marked dynamic."""
    generator = torch.Generator().manual_seed(100 * dist.get_rank() + seed)
    tokens, targets = (torch.randint(24, (rows, 5), generator=generator) for _ in range(2))
    torch._dynamo.mark_dynamic(tokens, 0)
    torch._dynamo.mark_dynamic(targets, 0)
    return [tokens, targets]


def many_forwards_before_a_backward(sharded: Tiny, step: Any) -> list[Tensor]:
    """Run three forwards of different sizes and an evaluation, then the backwards in another order."""
    losses = [step(*rows_of_rank(rows, rows)) for rows in (4, 3, 6)]
    with torch.no_grad():
        evaluated = step(*rows_of_rank(0, 4))
    for at in (1, 0, 2):
        losses[at].backward()
    gradients = [param.grad.to_local() for param in sharded.parameters()]
    sharded.zero_grad()
    return [evaluated, *gradients]


def an_optimizer_in_backward(sharded: Tiny, step: Any) -> list[Tensor]:
    """Update every parameter as soon as its gradient is complete."""

    def update(param: Tensor) -> None:
        with torch.no_grad():
            param -= 0.1 * param.grad
        param.grad = None

    hooks = [param.register_post_accumulate_grad_hook(update) for param in sharded.parameters()]
    for seed in range(2):
        step(*rows_of_rank(seed, 4)).backward()
    for hook in hooks:
        hook.remove()
    return [param.to_local().detach().clone() for param in sharded.parameters()]


WAYS = (many_forwards_before_a_backward, an_optimizer_in_backward)


def ways(cache: str) -> list[dict[str, Any]]:
    """Return the results of every way to use a step, without and with parameters that stay gathered."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    seen = []
    for options in ({}, {"memory_budget": LARGE}):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        sharded = Tiny(dim=64, hidden=256, layers=1)
        for module in (*sharded.layers, sharded):
            overlapc.fully_shard(module, mesh, reshard_after_forward=True)
        options = {**QUICK, "cache_dir": cache_of_rank(cache), **options}
        step = torch.compile(sharded, backend="overlapc", options=options, fullgraph=True)
        results = {way.__name__: way(sharded, step) for way in WAYS}
        seen.append({**results, "kept": counted(KEPT)})
    return seen


def test_every_way_to_use_a_step_gives_equal_results(tmp_path: Path) -> None:
    for without, kept in values_on_ranks(ways, 2, str(tmp_path), timeout_s=280):
        assert without["kept"] == 0 < kept["kept"]
        for way in (way.__name__ for way in WAYS):
            assert all(map(torch.equal, kept[way], without[way])), way


def smaller_batch(cache: str) -> dict[str, Any]:
    """Run two steps; in the second, the batch of one rank has another size."""
    torch.set_num_threads(1)
    torch._dynamo.utils.counters.clear()
    sharded = model()
    for each in sharded:
        overlapc.fully_shard(each)
    overlapc.fully_shard(sharded)
    options = {**QUICK, "cache_dir": cache_of_rank(cache), "memory_budget": LARGE, "warm_start": True}
    losses, alone = steps_of(sharded, batches()[:2], options)
    return {"losses": losses, "alone": alone[-1] > 0, "kept": counted(KEPT), "from disk": counted("steps_from_cache")}


def two_starts(cache: str) -> list[dict[str, Any]]:
    """Run these steps in two jobs; the second one finds the step of the first batch on disk."""
    cold = smaller_batch(cache)
    torch._dynamo.reset()
    rank_agreement._process = rank_agreement._Process()  # as another job
    return [cold, smaller_batch(cache)]


def test_a_rank_that_recompiles_alone_keeps_the_agreed_choice_even_if_that_comes_from_disk(tmp_path: Path) -> None:
    want = losses_of_one_process(batches()[:2])
    (first, first_warm), (second, second_warm) = values_on_ranks(two_starts, 2, str(tmp_path), timeout_s=240)
    for seen in (first, first_warm, second, second_warm):
        assert seen["losses"] == pytest.approx(want, rel=1e-4)
    assert first["kept"] > 0
    assert second["kept"] == 2 * first["kept"]
    assert (first_warm["kept"], second_warm["kept"]) == (0, first["kept"])  # of the recompiled graph
    assert [seen["alone"] for seen in (first, second)] == [False, True]
    assert first_warm["from disk"] == second_warm["from disk"] == 1
