"""Buckets on real ranks: bitwise equal results from fewer collectives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import overlapc
from overlapc.estimators.profiles.profile_file import load_profile, profile_to_json
from overlapc.report import record
from tests.parallel.tiny import Tiny, batch
from tests.ranks import values_on_ranks

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False),
}
PROFILE = "cpu-gloo"  # a stored profile, so that the buckets do not depend on the load of this machine
CASES = [("fp32", (1, 2)), ("bf16", (1, 2)), ("fp32", (2, 1))]  # precision, (replicas, shards)


def steps(cases: Sequence[tuple[str, tuple[int, int]]], folder: str) -> list[dict[str, Any]]:
    """Return, for each case, the results and number of collectives of a step with and without buckets.

    The last two entries are the results of `precisions` and `packed`.
    """
    torch.set_num_threads(1)
    seen = [{passes: step(precision, shape, passes) for passes in ("bucket", "none")} for precision, shape in cases]
    return [*seen, precisions(), packed(folder)]


def step(precision: str, shape: tuple[int, int], passes: str) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp"))
    axes = mesh["dp"] if shape[0] == 1 else mesh
    torch.manual_seed(3)
    model = Tiny()
    for module in (*model.layers, model):
        overlapc.fully_shard(module, mesh=axes, mp_policy=POLICIES[precision])
    options = {"rank_timeout": 60, "passes": passes, "peak_increase": 2.0, "profile": PROFILE}
    loss = torch.compile(model, backend="overlapc", fullgraph=True, options=options)(*own_batch())
    loss.backward()
    grads = {name: local(parameter.grad) for name, parameter in model.named_parameters()}
    counters = torch._dynamo.utils.counters["overlapc"]
    return {"loss": loss.detach(), "grads": grads, "collectives": counters["collectives"]}


def own_batch() -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the batch."""
    tokens, targets = (whole.chunk(2)[dist.get_rank()] for whole in batch(4))
    return tokens, targets


class Precisions(nn.Module):
    """Parameters of three dtypes in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.rough = nn.Parameter(torch.linspace(-1, 1, 24).view(6, 4).bfloat16())
        self.fine = nn.Parameter(torch.linspace(-2, 1, 16).view(4, 4))
        self.bias = nn.Parameter(torch.linspace(0, 1, 5))  # uneven
        self.counts = nn.Parameter(torch.arange(6), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return ((x @ self.rough.float() @ self.fine).sum(1) * self.counts[:4] + self.bias[:4]).sin().sum()


def packed(folder: str) -> dict[str, dict[str, Any]]:
    """Run a step of a model with a norm and a bias in each layer, with and without packing of small tensors."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    profile = load_profile(PROFILE)
    seen = {}
    for name, tensor_ns in (("packed", 1e9), ("apart", 0.0)):
        path = f"{folder}/{name}.{dist.get_rank()}.json"
        Path(path).write_text(json.dumps(profile_to_json(replace(profile, coalesced_tensor_ns=tensor_ns))))
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(3)
        model = Tiny()
        for module in (*model.layers, model):
            overlapc.fully_shard(module, mesh, mp_policy=POLICIES["bf16"], reshard_after_forward=True)
        options = {"rank_timeout": 60, "passes": "none", "profile": path}
        loss = torch.compile(model, backend="overlapc", fullgraph=True, options=options)(*own_batch())
        loss.backward()
        grads = {name: local(parameter.grad) for name, parameter in model.named_parameters()}
        counters = torch._dynamo.utils.counters["overlapc"]
        seen[name] = {"loss": loss.detach(), "grads": grads, "collectives": counters["collectives"]}
    return seen


def precisions(device: str = "cpu", profile: str = PROFILE) -> dict[str, dict[str, Any]]:
    """Run a step of `Precisions` with and without buckets; return results and numbers of collectives in forward and
    backward."""
    if device == "cuda":
        torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh(device, (2,), mesh_dim_names=("dp",))
    seen = {}
    for passes in ("bucket", "none"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = overlapc.fully_shard(Precisions().to(device), mesh)
        options = {"rank_timeout": 60, "passes": passes, "peak_increase": 2.0, "profile": profile}
        step = torch.compile(model, backend="overlapc", fullgraph=True, options=options)
        loss = step(torch.arange(24.0, device=device).view(4, 6) / 24 + dist.get_rank())
        loss.backward()
        grads = {name: local(parameter.grad) for name, parameter in model.named_parameters() if parameter.requires_grad}
        collectives = tuple(len(graph.collectives) for graph in record.report_of_process().steps[-1].graphs[-2:])
        seen[passes] = {"loss": loss.detach(), "grads": grads, "collectives": collectives}
    return seen


def local(grad: Any) -> Tensor:
    shard: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    return shard


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[list[dict[str, Any]]]:
    return values_on_ranks(steps, 2, CASES, str(tmp_path_factory.mktemp("profiles")), timeout_s=240)


@pytest.mark.parametrize("number", range(len(CASES)), ids=["fsdp-fp32", "fsdp-bf16", "hsdp"])
def test_buckets_change_no_bit_and_need_fewer_launches(outcomes, number):
    for outcome in outcomes:
        with_buckets, without = outcome[number]["bucket"], outcome[number]["none"]
        assert torch.equal(with_buckets["loss"], without["loss"])
        for name, grad in without["grads"].items():
            assert torch.equal(with_buckets["grads"][name], grad), name
        # Five parameters per layer are gathered in forward, and gathered and reduced in backward.
        assert with_buckets["collectives"] <= without["collectives"] / 2


def test_several_dtypes_are_one_launch(outcomes):
    check_precisions([outcome[-2] for outcome in outcomes])


def check_precisions(outcomes: Sequence[dict[str, dict[str, Any]]]) -> None:
    """Assert that four gathers of three dtypes are one launch, and three reduce-scatters of two dtypes another, with
    bitwise equal results."""
    for outcome in outcomes:
        with_buckets, without = outcome["bucket"], outcome["none"]
        assert (with_buckets["collectives"], without["collectives"]) == ((1, 1), (4, 3))
        assert torch.equal(with_buckets["loss"], without["loss"])
        for name, grad in without["grads"].items():
            assert torch.equal(with_buckets["grads"][name], grad), name


def test_packing_changes_no_bit_and_needs_fewer_launches(outcomes):
    for outcome in outcomes:
        packed, apart = outcome[-1]["packed"], outcome[-1]["apart"]
        assert packed["collectives"] < apart["collectives"] / 2
        assert torch.equal(packed["loss"], apart["loss"])
        for name, grad in apart["grads"].items():
            assert torch.equal(packed["grads"][name], grad), name
