"""Compare ten training steps on real ranks with eager FSDP2 (or eager TP): the same batches, the same optimizer.

Used with gloo by test_parity_steps.py and with NCCL by tests/multigpu.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import overlapc
from overlapc.parallel import FSDPModule, fully_shard
from tests.parallel.moe import MoE
from tests.parallel.tiny import Tiny, tensor_parallel
from tests.ranks import take_gpu, whole_tensor

LENGTH = 6  # of a sequence; divisible by the number of tensor-parallel ranks
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
HALF_ROOT = replace(HALF, output_dtype=torch.float64)


@dataclass(frozen=True)
class Case:
    """A model, how it is parallelized, and how it is trained. `dp`, `replicas` and `tp` are sizes of mesh axes."""

    name: str
    dp: int = 1
    replicas: int = 1
    tp: int = 1
    how: dict[str, Any] = field(default_factory=dict)  # options of fully_shard
    root: dict[str, Any] = field(default_factory=dict)  # options for the whole model that override those
    sizes: dict[str, Any] = field(default_factory=dict)  # arguments of Tiny
    frozen: str = ""  # parameters whose names begin with this require no gradient
    micro: int = 1  # micro-batches per step; all but the last without gradient reduction
    divide: float = 0.0  # gradient divide factor; 0: the number of ranks
    ends: bool = False  # shard the embedding as a group, and the last norm and the head together as another group
    fsdp2: str = ""  # use FSDP2's fully_shard: "adopt" then calls adopt_fsdp2, "hooks" does not
    unflattened: bool = False  # the mesh is unflattened from a mesh of one unrelated axis, as in torchtitan
    placed: bool = False  # experts are sharded on their own mesh by shard_placement_fn instead of by their own call
    experts: str = ""  # "even", "uneven": a mixture of experts over all ranks instead of Tiny
    adam: bool = False
    budget: str = ""  # memory_budget within which parameters stay gathered for backward
    tolerance: float = 2e-5


def on_dim_1(param: nn.Parameter) -> Shard | None:
    """Return the placement that shards matrices by columns."""
    return Shard(1) if param.ndim == 2 else None


ADOPT_PLACED = Case(
    "adopt experts on a mesh of their own", dp=2, replicas=2, experts="even", fsdp2="adopt", placed=True
)
TWO = (
    Case("reshard", dp=2, adam=True, tolerance=1e-4),
    Case("keep", dp=2, how={"reshard_after_forward": False}),
    Case("frozen, tied", dp=2, sizes={"tied": True}, frozen="layers.0.up"),
    Case("uneven", dp=2, sizes={"vocab": 23, "hidden": 17}, how={"reshard_after_forward": True}),
    Case("other dim", dp=2, how={"shard_placement_fn": on_dim_1, "reshard_after_forward": True}),
    Case(
        "mixed precision",
        dp=2,
        sizes={"one_row": True},
        how={"mp_policy": HALF},
        root={"mp_policy": HALF_ROOT},
        tolerance=2e-2,
    ),
    Case("checkpoint inside", dp=2, sizes={"ac": "inside"}),
    Case("checkpoint around", dp=2, sizes={"ac": "around", "tied": True}, how={"reshard_after_forward": True}),
    Case("accumulate", dp=2, micro=3, sizes={"tied": True}, divide=5.0),
    Case("a list of modules", dp=2, ends=True),
    Case("adopt", dp=2, fsdp2="adopt", micro=2, divide=3.0, ends=True, budget="1GiB"),
    Case("hooks", dp=2, fsdp2="hooks"),
    Case("tp", tp=2),
    Case("experts", dp=2, experts="even"),
    Case("experts uneven", dp=2, experts="uneven"),
)
FOUR = (
    Case("to fewer ranks", dp=4, how={"reshard_after_forward": 2}),
    # Deciding which parameters stay gathered plans each graph several times, so these two models have one layer.
    Case("hsdp accumulate", dp=2, replicas=2, micro=2, sizes={"layers": 1}, budget="1GiB"),
    Case(
        "tp + fsdp, unflattened",
        dp=2,
        tp=2,
        how={"mp_policy": HALF},
        root={"mp_policy": HALF_ROOT},
        tolerance=2e-2,
        unflattened=True,
    ),
    Case(
        "adopt tp + fsdp",
        dp=2,
        tp=2,
        fsdp2="adopt",
        sizes={"ac": "around", "layers": 1},
        unflattened=True,
        budget="1GiB",
    ),
    Case("experts on groups of their own", dp=2, replicas=2, experts="even"),
    *((ADOPT_PLACED,) if hasattr(_fsdp_common, "ShardPlacementResult") else ()),  # torch 2.11: one mesh per call
)


def placement(experts: set[nn.Parameter], mesh: DeviceMesh, others: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """Return a shard_placement_fn: experts over all of `mesh`, other parameters over the last axis of `others`."""
    own = _fsdp_common.FSDPMeshInfo(mesh, 0)
    default = _fsdp_common.HSDPMeshInfo(others, shard_mesh_dim=1, replicate_mesh_dim=0)
    return lambda param: _fsdp_common.ShardPlacementResult(Shard(0), own if param in experts else default)


def spread(case: Case, mesh: DeviceMesh, apply: Callable[..., Any]) -> nn.Module:
    """Return the sharded model of a case; every call creates the same parameters."""
    torch.manual_seed(0)
    device = mesh.device_type
    if case.experts:
        model: nn.Module = MoE(mesh["dp"].get_group(), even=case.experts == "even").to(device)
    else:
        model = Tiny(**case.sizes).to(device)
    for name, param in model.named_parameters():
        if case.frozen and name.startswith(case.frozen):
            param.requires_grad_(False)
    if case.tp > 1:
        tensor_parallel(model, mesh["tp"])
    if case.dp > 1:
        axes = mesh["dp"] if case.replicas == 1 else mesh["replicate", "dp"]
        ignored: dict[str, Any] = {}
        if isinstance(model, MoE) and case.replicas == 1:  # each rank has its own expert
            ignored = {"ignored_params": set(model.experts.parameters())}
        inner = [(layer, axes) for layer in getattr(model, "layers", ())]
        if case.ends:
            inner += [(model.embed, axes), ([model.norm, model.head], axes)]
        if isinstance(model, MoE) and case.replicas > 1:  # every replica has all experts, and shards each over replicas
            inner = [] if case.placed else [(model.experts, mesh["replicate"])]
        if case.placed:
            ignored = {"shard_placement_fn": placement(set(model.experts.parameters()), mesh["replicate"], axes)}
        for module, its_axes in inner:
            apply(module, mesh=its_axes, **case.how)
        apply(model, mesh=axes, **{**case.how, **case.root}, **ignored)
    # FSDP2 does not support divide factors over gloo.
    for module in model.modules() if case.divide and "nccl" in str(dist.get_backend_config()) else ():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(case.divide)
    return model


def train(case: Case, model: nn.Module, step: Callable[..., Tensor], mesh: DeviceMesh, steps: int) -> dict[str, Any]:
    """Train and return this rank's losses and the full gradients of the last step."""
    params = [param for param in model.parameters() if param.requires_grad]
    # No foreach: torch 2.11 cannot step a list that mixes DTensors and plain tensors.
    each: dict[str, Any] = {"params": params, "foreach": False}
    optimizer = torch.optim.AdamW(**each, lr=1e-3) if case.adam else torch.optim.SGD(**each, lr=0.1)
    rank = mesh.get_local_rank("replicate") * case.dp + mesh.get_local_rank("dp")
    generator = torch.Generator().manual_seed(100 + rank)
    losses = []
    for number in range(steps):
        optimizer.zero_grad()
        for micro in range(case.micro):
            if case.micro > 1:
                model.set_requires_gradient_sync(micro == case.micro - 1)
            vocab = case.sizes.get("vocab", 24)
            tokens, targets = (torch.randint(vocab, (2, LENGTH), generator=generator) for _ in range(2))
            loss = step(tokens.to(mesh.device_type), targets.to(mesh.device_type))
            (loss / case.micro).backward()
            losses.append(loss.item())
        if number < steps - 1:
            optimizer.step()
    grads = {name: whole_tensor(param.grad) for name, param in model.named_parameters() if param.grad is not None}
    return {"losses": losses, "grads": grads}


def compare(case: Case, device: str, steps: int = 10, **options: Any) -> dict[str, Any]:
    """Train a case with overlapc and in eager; return relative differences and counts of what was compiled.

    options: options of the backend.
    """
    sizes = (case.replicas, case.dp, case.tp)
    names = ("replicate", "dp", "tp")
    if case.unflattened:
        world = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("world",))
        mesh = world._unflatten(0, sizes, names)
    else:
        mesh = init_device_mesh(device, sizes, mesh_dim_names=names)
    theirs_model = spread(case, mesh, fsdp2.fully_shard)
    theirs = train(case, theirs_model, theirs_model, mesh, steps)
    model = spread(case, mesh, fsdp2.fully_shard if case.fsdp2 else fully_shard)
    if case.fsdp2 == "adopt":
        assert overlapc.adopt_fsdp2(model) is model
        assert isinstance(model, FSDPModule)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(capture_scalar_outputs=True), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        whole = case.fsdp2 != "hooks"
        if case.budget:  # with slow links, a second gather takes longer than what it is hidden behind, on any machine
            options = {"memory_budget": case.budget, "profile": "cpu-gloo", **options}
        compiled = torch.compile(model, backend="overlapc", fullgraph=whole, options={"rank_timeout": 120, **options})
        ours = train(case, model, compiled, mesh, steps)
    assert list(ours["grads"]) == list(theirs["grads"]), "different parameters have gradients"
    counters = torch._dynamo.utils.counters["overlapc"]
    return {
        "losses": max(abs(a - b) / abs(b) for a, b in zip(ours["losses"], theirs["losses"], strict=True)),
        "grads": {name: difference(ours["grads"][name], theirs["grads"][name]) for name in theirs["grads"]},
        "graphs": counters["graphs"],
        "collectives": counters["collectives"],
        "kept": counters["gathers_kept_for_backward"],
        "advised": sum("adopt_fsdp2" in str(warning.message) for warning in said),
    }


def overlap_changes(device: str) -> dict[str, Any]:
    """Train a bfloat16 model with and without passes; return whether losses and gradients have equal bits, and counts
    of kernels and collectives."""
    case = Case("bf16", dp=2, how={"mp_policy": HALF, "reshard_after_forward": True})
    mesh = init_device_mesh(device, (1, 2, 1), mesh_dim_names=("replicate", "dp", "tp"))
    runs = []
    for passes in (None, "none"):
        model = spread(case, mesh, fully_shard)
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        options = {"rank_timeout": 120, **({} if passes is None else {"passes": passes})}
        made = train(case, model, torch.compile(model, backend="overlapc", options=options), mesh, 3)
        runs.append((made, dict(torch._dynamo.utils.counters["overlapc"])))
    (on, counted), (off, counted_off) = runs
    return {
        "losses": on["losses"] == off["losses"],
        "grads": all(torch.equal(on["grads"][name], off["grads"][name]) for name in off["grads"]),
        "kernels": (counted["kernels"] + counted["kernels_sharing"], counted_off["kernels"]),
        "sharing": (counted["kernels_sharing"], counted_off["kernels_sharing"]),
        "collectives": (counted["collectives"], counted_off["collectives"]),
    }


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Return the norm of the difference relative to the norm of `theirs`, or to 1e-6 if that norm is only rounding."""
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-6))


def seen_by(cases: tuple[Case, ...], device: str, overlap: bool = False, **options: Any) -> dict[str, dict[str, Any]]:
    """Run `compare` for every case; with `overlap`, also `overlap_changes`, which needs two ranks."""
    torch.set_num_threads(1)
    if device == "cuda":
        take_gpu()
    seen = {case.name: compare(case, device, **options) for case in cases}
    if overlap:
        seen["overlap"] = overlap_changes(device)
    return seen


def check(outcomes: list[dict[str, Any]], case: Case) -> None:
    """outcomes: what each rank saw of `case`."""
    for rank, seen in enumerate(outcomes):
        assert seen["losses"] <= case.tolerance, (case.name, seen["losses"])
        worst = max(seen["grads"], key=seen["grads"].__getitem__)
        assert seen["grads"][worst] <= 10 * case.tolerance, (case.name, worst, seen["grads"][worst])
        assert (seen["collectives"] > 0) == (case.fsdp2 != "hooks")
        assert (seen["kept"] > 0) == (case.budget != "")
        assert (seen["advised"] > 0) == (case.fsdp2 == "hooks" and rank == 0), "exactly rank 0 must warn about hooks"


def check_overlap(outcomes: list[dict[str, Any]]) -> None:
    """Assert what `overlap_changes` returned on each rank."""
    for seen in outcomes:
        assert seen["losses"]
        assert seen["grads"]
        assert seen["kernels"][0] == seen["kernels"][1] > 0
        assert seen["sharing"][0] > seen["sharing"][1] == 0, "the casts before a bucket do not share launches"
        assert seen["collectives"][0] < seen["collectives"][1], "the passes did nothing: no bucket was made"
