"""A Llama step on real ranks (FSDP, HSDP, TP): loss and every gradient equal those of one process on the same global
batch, through the whole compiler (C++ kernels, gloo)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import overlapc
from overlapc.launch.llama import Llama, LlamaConfig, tensor_parallel
from tests.ranks import take_gpu, values_on_ranks, whole_tensor

ROWS, SEQ = 8, 16


@dataclass(frozen=True)
class Case:
    """A way to parallelize the model; `dp`, `replicas` and `tp` are the sizes of the mesh axes."""

    name: str
    dp: int = 1
    replicas: int = 1
    tp: int = 1
    reshard: bool = True
    passes: str | None = None
    transport: str = "auto"
    per_host: int | None = None  # treat every `per_host` consecutive ranks as one host
    layers: int = 2


TWO = (
    Case("fsdp", dp=2),
    Case("fsdp-keep", dp=2, reshard=False),
    Case("fsdp-no-passes", dp=2, passes="none"),
    Case("tp", tp=2),
    Case("fsdp-copies", dp=2, transport="copy"),
    Case("tp-copies", tp=2, transport="copy", layers=1),
)
FOUR = (
    Case("hsdp", dp=2, replicas=2, layers=1),
    Case("tp-fsdp", dp=2, tp=2, layers=1),
    Case("hsdp-copies", dp=2, replicas=2, transport="copy", layers=1),
    Case("hsdp-hosts-copies", dp=2, replicas=2, transport="copy", per_host=2, layers=1),
    Case("tp-fsdp-copies", dp=2, tp=2, transport="copy", layers=1),
    Case("fsdp-hosts-copies", dp=4, transport="copy", per_host=2, layers=1),
)


def batch() -> tuple[Tensor, Tensor]:
    """Return tokens and targets, made on the CPU so that they are the same for every device."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, LlamaConfig.tiny().vocab, (ROWS, SEQ + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def model(layers: int) -> Llama:
    made = Llama(replace(LlamaConfig.tiny(), layers=layers))
    made.reset_parameters(3)
    return made


def reference(layers: int, device: str) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of one eager process on the whole batch, in float32."""
    whole = model(layers).to(device)
    loss = whole(*(each.to(device) for each in batch()))
    loss.backward()
    return loss.item(), {name: parameter.grad for name, parameter in whole.named_parameters()}


def errors(cases: tuple[Case, ...], device: str) -> dict[str, dict[str, Any]]:
    """Return the relative errors of this rank's loss and gradients, by case."""
    torch.set_num_threads(1)
    if device == "cuda":
        take_gpu()
    return {case.name: one(case, device, *reference(case.layers, device)) for case in cases}


def one(case: Case, device: str, expected: float, grads: dict[str, Tensor]) -> dict[str, Any]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    mesh = init_device_mesh(device, (case.replicas, case.dp, case.tp), mesh_dim_names=("replicate", "dp", "tp"))
    spread = model(case.layers).to(device)
    if case.tp > 1:
        tensor_parallel(spread, mesh["tp"])
    if case.dp > 1:
        axes = mesh["dp"] if case.replicas == 1 else mesh["replicate", "dp"]
        for layer in spread.layers:
            overlapc.fully_shard(layer, mesh=axes, reshard_after_forward=case.reshard)
        overlapc.fully_shard(spread, mesh=axes, reshard_after_forward=case.reshard)
    options = {
        "rank_timeout": 60,
        "transport": case.transport,
        "ranks_per_host": case.per_host,
        **({"passes": case.passes} if case.passes else {}),
    }
    step = torch.compile(spread, backend="overlapc", fullgraph=True, options=options)
    parts = case.replicas * case.dp
    part = mesh.get_local_rank("replicate") * case.dp + mesh.get_local_rank("dp")
    tokens, targets = (each.chunk(parts)[part].to(device) for each in batch())
    loss = step(tokens, targets)
    loss.backward()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    mean /= dist.get_world_size()
    worst = {name: difference(parameter.grad, grads[name]) for name, parameter in spread.named_parameters()}
    counters = dict(torch._dynamo.utils.counters["overlapc"])
    return {"loss": abs(mean.item() - expected) / expected, "grads": worst, "counters": counters}


def difference(ours: Any, expected: Tensor) -> float:
    return ((whole_tensor(ours) - expected).norm() / expected.norm()).item()


# The cases tested on CPUs: copies on each kind of mesh. tests/parallel/test_parity_steps.py compares the other cases
# with eager FSDP2, and tests/launch/test_demo.py runs this model over the group's library.
HERE = {
    2: tuple(case for case in TWO if case.name in ("tp", "fsdp-copies")),
    4: tuple(case for case in FOUR if case.name not in ("hsdp", "hsdp-copies", "tp-fsdp")),
}


@pytest.mark.parametrize(("ranks", "cases"), HERE.items(), ids=["two-ranks", "four-ranks"])
def test_loss_and_gradients_equal_one_process(ranks, cases):
    check(values_on_ranks(errors, ranks, cases, "cpu", timeout_s=240), cases)


def check(outcomes: list[Any], cases: tuple[Case, ...]) -> None:
    for outcome in outcomes:
        for case in cases:
            seen = outcome[case.name]
            assert seen["loss"] <= 1e-6, case.name
            assert max(seen["grads"].values()) <= 1e-5, (case.name, seen["grads"])
            assert seen["counters"]["kernels"] > 0
            assert seen["counters"]["collectives"] > 0
            assert (seen["counters"].get("collectives_by_copies", 0) > 0) == (case.transport == "copy")
            by_library = seen["counters"].get("collectives_not_by_copies", 0)
            assert by_library > 0 or case.per_host is None, "collectives between hosts must use the library"
