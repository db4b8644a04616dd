"""Training with `transport=copy` on real ranks, through the whole compiler: gradients, determinism, and the reasons
why a collective is not done by copies."""

from __future__ import annotations

import contextlib
import gc
import json
import random
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import overlapc
from overlapc.errors import OverlapcError, PeerLost
from overlapc.estimators.device import Link
from overlapc.estimators.profiles.profile_file import link_to_json, load_profile, profile_to_json
from overlapc.report import record
from overlapc.report.held_memory import peaks
from overlapc.runtime.copies import command_queues
from tests.ranks import values_on_ranks

STEPS = 10
_c10d = torch.ops._c10d_functional


class Block(nn.Module):
    """A norm with small parameters, and two matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def delays(device: str) -> Any:
    """Return a context that delays copies, and on GPUs the computation beside them, at random."""
    dice = random.Random(dist.get_rank())
    if device == "cuda":
        enqueue = command_queues.StreamQueue.run

        def late_run(self: command_queues.StreamQueue, commands: Any, run: Any) -> torch.cuda.Event:
            for stream in (self._stream, torch.cuda.current_stream()):
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(dice.randrange(1 << 20) if dice.random() < 0.3 else 1)
            return enqueue(self, commands, run)

        return mock.patch.object(command_queues.StreamQueue, "run", late_run)
    plain = command_queues.ThreadQueue._do

    def late(self: command_queues.ThreadQueue, command: Any) -> None:
        if dice.random() < 0.1:
            time.sleep(dice.random() * 2e-3)
        plain(self, command)

    return mock.patch.object(command_queues.ThreadQueue, "_do", late)


def trained(
    transport: str, policy: MixedPrecisionPolicy, device: str, steps: int, late: bool = False, measured: bool = False
) -> tuple[list[float], list[Tensor], list[Tensor]]:
    """Train and return the losses, this rank's parameters after STEPS steps, and those after the last step.

    measured: measure the times of the last step.
    """
    torch._dynamo.reset()
    torch.manual_seed(0)
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = nn.Sequential(Block(), nn.Linear(16, 10)).to(device)
    for part in (*model, model):
        overlapc.fully_shard(part, mesh=mesh, mp_policy=policy)
    step = torch.compile(model, backend="overlapc", options={"transport": transport, "warm_start": False})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses: list[float] = []
    early: list[Tensor] = []
    with delays(device) if late else contextlib.nullcontext():
        for number in range(steps):
            x = torch.randn(8, 16, generator=generator).to(device)
            with overlapc.report.measure() if measured and number == steps - 1 else contextlib.nullcontext():
                loss = step(x).float().square().mean()
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if len(losses) == STEPS:
                early = [parameter.to_local().detach().clone() for parameter in model.parameters()]
    return losses, early, [parameter.to_local().detach().clone() for parameter in model.parameters()]


def worst(one: list[Tensor], other: list[Tensor]) -> float:
    """Return the largest elementwise difference of two lists of tensors, relative to each tensor's largest element."""
    pairs = ((a, b) for a, b in zip(one, other, strict=True) if b.numel())
    return max(float((a - b).abs().max() / (b.abs().max() + 1e-6)) for a, b in pairs)


POLICIES = {"bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "fp32": MixedPrecisionPolicy()}


def parity(name: str, device: str = "cpu", steps: int = STEPS) -> dict[str, Any]:
    """Train with copies, with the group's library and (bf16) with delayed copies, and return how the runs compare."""
    torch.set_num_threads(1)
    policy = POLICIES[name]
    losses, early, parameters = trained("copy", policy, device, steps, measured=True)
    graphs = overlapc.report().steps[0].graphs[-2:]
    via = {(row.op, row.via) for graph in graphs for row in graph.collectives}
    theirs, library, _ = trained("nccl", policy, device, STEPS)
    again, late = losses, parameters
    if name == "bf16":
        again, _, late = trained("copy", policy, device, steps, late=True)
    return {
        "via": via,
        "parameters": worst(early, library),
        "losses": max(abs(a - b) for a, b in zip(losses[:STEPS], theirs, strict=True)),
        "same bits": losses == again and all(map(torch.equal, parameters, late)),
        "not copied": [graph.not_copied for graph in graphs],
        "pools": [graph.pool_bytes > 0 for graph in graphs],
        "in the trace": [graph.measured is not None and graph.measured.shows_communication for graph in graphs],
    }


# Copies send bf16 gradients rounded as eager rounds them. For gloo, kernels cast gradients to float32 and do not round
# some of them to bf16 first, hence the larger tolerance.
@pytest.mark.parametrize(("ranks", "policy", "most"), [(4, "bf16", 2e-2), (2, "fp32", 1e-5)])
def test_ten_fsdp_steps_match_gloo_and_have_the_same_bits_with_random_delays(ranks, policy, most):
    check_parity(values_on_ranks(parity, ranks, policy, timeout_s=300.0), most)


def check_parity(outcomes: list[dict[str, Any]], most: float, in_trace: bool = True) -> None:
    """Assert the results of `parity`; `most` bounds the difference of losses and parameters from the library's.

    in_trace: whether a profiler shows the copies. It cannot where ranks share a GPU.
    """
    for found in outcomes:
        assert found["via"] == {("all_gather", "copy"), ("all_to_all", "copy")}
        assert found["not copied"] == [{}, {}]
        assert found["pools"] == [True, True]
        assert found["in the trace"] == [in_trace, in_trace]
        assert found["parameters"] < most
        assert found["losses"] < most
        assert found["same bits"]


def out_of_memory(folder: str) -> tuple[str, str, Any]:
    """Compile while rank 1 cannot allocate shared memory; return the error of transport=copy, the reason that
    transport=auto reports for not using copies, and whether its result is right."""
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    given = torch.full((8192,), dist.get_rank() + 1.0).bfloat16(), ranks, group
    profile = profile_knowing(Link(1e14, 10.0), Path(folder, f"{dist.get_rank()}.json"))
    there = "/nowhere" if dist.get_rank() == 1 else "/dev/shm"
    with mock.patch("overlapc.runtime.copies.shared_memory.FOLDER", there):
        compiled = torch.compile(summed, backend="overlapc", options={"transport": "copy", "warm_start": False})
        with pytest.raises(OverlapcError) as caught:
            compiled(*given)
        torch._dynamo.reset()
        options = {"transport": "auto", "profile": profile, "warm_start": False}
        result = torch.compile(summed, backend="overlapc", options=options)(*given)
    (why,) = overlapc.report().steps[-1].graphs[-1].not_copied.values()
    return str(caught.value), why, result.tolist() == [1.5] * 4096


def test_a_rank_without_shared_memory_fails_all_ranks_or_makes_all_use_the_library(tmp_path):
    told = values_on_ranks(out_of_memory, 2, str(tmp_path))
    assert told[0] == told[1]
    error, why, right = told[0]
    assert "rank 1: cannot allocate " in error
    assert "to share with other ranks" in error
    assert "hint: options={" in error
    assert why.startswith("rank 1: cannot allocate ")
    assert right


def summed(grad: Tensor, ranks: int, group: str) -> Tensor:
    wide = grad.to(torch.float32)
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(wide, "avg", ranks, group))


def summed_on_all(grad: Tensor, group: str) -> Tensor:
    return _c10d.wait_tensor(_c10d.all_reduce(grad.to(torch.float32), "sum", group))


def swapped(x: Tensor, ranks: int, group: str) -> tuple[Tensor, Tensor]:
    parts = [x.shape[0] // ranks] * ranks
    once = _c10d.wait_tensor(_c10d.all_to_all_single(x, parts, parts, group))
    return once, _c10d.wait_tensor(_c10d.all_to_all_single(once * 2, parts, parts, group)).sum()


def sums(device: str = "cpu") -> list[dict[str, float]]:
    """Return the largest errors of this rank's part of reduced bf16 gradients, by transport and reference."""
    torch.set_num_threads(1)
    ranks, rank = dist.get_world_size(), dist.get_rank()
    found = []
    x = torch.arange(6.0 * ranks, device=device).view(-1, 3) + 100 * rank
    expected = torch.empty_like(x)
    dist.all_to_all_single(expected, x)
    options = {"transport": "copy", "warm_start": False}
    once, total = torch.compile(swapped, backend="overlapc", options=options)(x, ranks, dist.group.WORLD.group_name)
    assert overlapc.report().steps[-1].graphs[-1].not_copied == {}
    found.append({"all-to-all": float((once - expected).abs().max() + (total - 2 * x.sum()).abs())})
    group = dist.group.WORLD.group_name
    gradients, exact, in_order = [], [], []
    for seed in range(3):
        generator = torch.Generator().manual_seed(10 * seed + rank)
        grad = torch.randn(ranks * 700, 3, generator=generator).mul_(10.0 ** (seed - 1)).bfloat16().to(device)
        all_ = [torch.empty_like(grad) for _ in range(ranks)]
        dist.all_gather(all_, grad)
        gradients.append(grad)
        exact.append(torch.stack(all_).double().mean(0).chunk(ranks)[rank])
        in_order.append(sum((each.float() for each in all_[1:]), all_[0].float()))
    errors: list[dict[str, float]] = [{} for _ in gradients]
    torch._dynamo.reset()
    compiled = torch.compile(summed_on_all, backend="overlapc", options=options)
    for grad, total, seen in zip(gradients, in_order, errors, strict=True):
        seen["all-reduce"] = float((compiled(grad[:-1], group) - total[:-1]).abs().max())
    for transport in ("copy", "nccl"):
        torch._dynamo.reset()
        compiled = torch.compile(summed, backend="overlapc", options={**options, "transport": transport})
        for grad, mean, total, seen in zip(gradients, exact, in_order, errors, strict=True):
            result = compiled(grad, ranks, group)
            seen[transport] = float((result.double() - mean).abs().max())
            if transport == "copy":
                seen["order"] = float((result - total.div(ranks).chunk(ranks)[rank]).abs().max())
    return [*found, *errors]


def test_sums_are_in_rank_order_and_as_exact_as_a_float32_reduce_scatter():
    check_sums(values_on_ranks(sums, 4, timeout_s=300.0))


def check_sums(outcomes: list[list[dict[str, float]]]) -> None:
    """Assert that sums are in rank order and no further from float64 than those of the group's library in float32."""
    for exchanged, *found in outcomes:
        assert exchanged == {"all-to-all": 0.0}
        for errors in found:
            assert errors["order"] == errors["all-reduce"] == 0.0
            assert errors["copy"] <= errors["nccl"] * 1.01


def gathered(shard: Tensor, ranks: int, group: str) -> Tensor:
    return _c10d.wait_tensor(_c10d.all_gather_into_tensor(shard, ranks, group)).float().sum()


def profile_knowing(link: Link | None, path: Path) -> str:
    """Write a profile whose copies take the time of `link` (None: unknown) and return its file name."""
    stored = profile_to_json(load_profile("cpu-gloo"))
    if link is not None:
        stored["quantities"]["copy_link"] = {"value": link_to_json(link), "origin": "the test"}
    path.write_text(json.dumps(stored))
    return str(path)


def chosen(folder: str) -> list[tuple[list[tuple[str, str]], list[str], float]]:
    """Compile with transport=auto and profiles whose copies are fast, slow or unknown.

    For each case return the (op, transport) of each collective, the reasons against copies, and the result's mean.
    """
    torch.set_num_threads(1)
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    quick, slow = Link(1e14, 10.0), Link(1e6, 10.0)
    x = torch.full((ranks * 4096,), dist.get_rank() + 1.0).bfloat16()
    found = []
    for function, link, options in (
        *((summed, quick, {}), (summed, slow, {}), (summed, None, {})),
        *((gathered, quick, {"memory_budget": 1 << 20}), (gathered, quick, {"memory_budget": 52 << 10})),
        (summed, slow, {"transport": "copy"}),
        *((summed, quick, {"transport": "copy", **other}) for other in ({"wrapper": "fx"}, {"cuda_graphs": True})),
    ):
        path = profile_knowing(link, Path(folder, f"{len(found)}_{dist.get_rank()}.json"))
        torch._dynamo.reset()
        options = {"transport": "auto", "profile": path, "warm_start": False, **options}
        result = torch.compile(function, backend="overlapc", options=options)(x, ranks, group)
        (graph,) = overlapc.report().steps[-1].graphs[-1:]
        via = [(row.op, row.via) for row in graph.collectives]
        found.append((via, list(graph.not_copied.values()), float(result.float().mean())))
    return found


def test_copies_are_used_where_they_are_predicted_to_be_faster(tmp_path):
    for quick, slow, unknown, fits, over, told, fx, cuda_graphs in values_on_ranks(chosen, 2, str(tmp_path)):
        assert quick == told == ([("all_to_all", "copy")], [], 1.5)
        assert slow == ([("reduce_scatter", "")], ["the group's library is faster for this size"], 1.5)
        assert unknown == ([("reduce_scatter", "")], [], 1.5)
        assert fits == ([("all_gather", "copy")], [], 3 * 8192)
        assert over[0] == [("all_gather", "")]
        assert "would raise the peak to" in over[1][0]
        assert over[2] == 3 * 8192
        assert fx == ([("reduce_scatter", "")], ["wrapper='fx' does not support copies"], 1.5)
        assert cuda_graphs == (
            [("reduce_scatter", "")],
            ["CUDA graphs cannot hold copies that wait for other ranks"],
            1.5,
        )


class TakesMoreInForward(nn.Module):
    """A layer beside large products, whose memory is free before backward begins."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(48, 192, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        beside = x.detach().T.repeat(4, 1) @ x.detach().repeat(1, 4)
        return torch.relu(self.up(x)).sum() + (beside @ beside).sum()


def budgets(folder: str) -> dict[str, Any]:
    """Train without a memory budget, and with one that forward fits into only if backward shares no more memory than
    forward does. Return for each the pools of forward and backward, the peaks and budget, and why backward did not use
    copies."""
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    path = profile_knowing(Link(1e14, 10.0), Path(folder, f"{dist.get_rank()}.json"))
    found: dict[str, Any] = {}

    def trained(name: str, **more: Any) -> None:
        torch._dynamo.reset()
        record.clear()
        gc.collect()  # frees the memory that was shared for the model before
        torch.manual_seed(0)
        model = overlapc.fully_shard(TakesMoreInForward(), mesh=mesh, reshard_after_forward=False)
        options = {"transport": "auto", "profile": path, "warm_start": False, "peak_increase": 0.0, **more}
        step = torch.compile(model, backend="overlapc", options=options)
        step(torch.ones(2, 48, requires_grad=True)).backward()
        forward, backward = overlapc.report().steps[-1].graphs
        found[name] = {
            "pools": (forward.pool_bytes, backward.pool_bytes),
            "peaks": peaks([forward, backward]),
            "forward": forward.peak_bytes,
            "why not": list(backward.not_copied.values()),
            "gradient": sum(parameter.grad.full_tensor().sum().item() for parameter in model.parameters()),
        }

    trained("free")
    found["budget"] = found["free"]["forward"]
    trained("bounded", memory_budget=found["budget"])
    return found


def test_what_backward_shares_for_copies_keeps_forward_within_the_budget(tmp_path):
    for found in values_on_ranks(budgets, 3, str(tmp_path)):
        free, bounded, budget = found["free"], found["bounded"], found["budget"]
        forward_shares, backward_shares = free["pools"]
        assert 0 < forward_shares < backward_shares
        assert free["peaks"]["forward_0"] == free["forward"] + backward_shares - forward_shares > budget
        assert max(bounded["peaks"].values()) <= budget
        assert bounded["pools"] == (forward_shares, 0)
        assert "over memory_budget" in bounded["why not"][0]
        assert bounded["gradient"] == pytest.approx(free["gradient"])


FAILS = [False]


@torch.library.custom_op("overlapc_tests::fails_in_flight", mutates_args=())
def fails_in_flight(x: Tensor) -> Tensor:
    if FAILS[0]:
        raise ValueError("failed in flight")
    return x.clone()


@fails_in_flight.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def summed_beside(grad: Tensor, x: Tensor, ranks: int, group: str) -> Tensor:
    started = _c10d.reduce_scatter_tensor(grad.to(torch.float32), "sum", ranks, group)
    beside = fails_in_flight(x)
    return _c10d.wait_tensor(started) + beside


def after_a_failure(device: str = "cpu") -> dict[str, Any]:
    """Let all ranks fail while copies are in flight; return the results before and after, and the error between."""
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    grad = torch.full((ranks * 4,), dist.get_rank() + 1.0, device=device).bfloat16()
    given = grad, torch.ones(4, device=device), ranks, group
    options = {"transport": "copy", "warm_start": False}
    step = torch.compile(summed_beside, backend="overlapc", options=options)
    found: dict[str, Any] = {"before": step(*given).tolist()}
    FAILS[0] = True
    with pytest.raises(ValueError, match="failed in flight"):
        step(*given)
    FAILS[0] = False
    with pytest.raises(PeerLost) as told:
        step(*given)
    found["told"] = str(told.value)
    torch._dynamo.reset()
    return {**found, "after": torch.compile(summed_beside, backend="overlapc", options=options)(*given).tolist()}


def test_after_an_exception_in_flight_the_next_step_fails_and_a_new_compilation_works():
    check_failure(values_on_ranks(after_a_failure, 2))


def check_failure(outcomes: list[dict[str, Any]]) -> None:
    """Assert the outcomes of `after_a_failure`."""
    for found in outcomes:
        assert found["told"].startswith("@")
        assert "a step failed on this rank between its copies" in found["told"]
        assert found["before"] == found["after"] == [4.0] * 4
