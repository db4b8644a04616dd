"""Loss and every gradient of real ranks over gloo equal those of one process with the whole batch.

All cases run in eager, and one per number of ranks is also compiled; test_parity_steps.py compiles the other cases and
compares them with FSDP2.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from overlapc.parallel import fully_shard
from tests.parallel.sharded import shard
from tests.parallel.tiny import Recorder, Tiny, batch, ops, tensor_parallel
from tests.ranks import values_on_ranks

ROWS = 4  # of the global batch
LENGTH = 6  # of a sequence; divisible by the number of tensor-parallel ranks


def model_of(**sizes: Any) -> Tiny:
    torch.manual_seed(0)
    return Tiny(**sizes)


def run(model: nn.Module, dp: DeviceMesh | None, compiled: bool, vocab: int) -> tuple[Tensor, dict[str, Tensor], Any]:
    """Run a step and return (global loss, full gradients, recorded graphs).

    Each data-parallel rank takes its rows of the batch.
    """
    tokens, targets = batch(ROWS, LENGTH, vocab)
    if dp is not None:
        rank, size = dp.get_rank(), dist.get_world_size()
        flat = dp.mesh.flatten().tolist()
        rank, size = flat.index(rank), len(flat)
        tokens, targets = tokens.chunk(size)[rank], targets.chunk(size)[rank]
    torch._dynamo.reset()
    recorder = Recorder()
    step = torch.compile(model, backend=recorder, fullgraph=True) if compiled else model
    loss = step(tokens, targets)
    loss.backward()
    total = loss.detach().float().clone()
    if dp is not None:
        for axis in range(dp.ndim):
            dist.all_reduce(total, group=dp.get_group(axis))
        total /= dp.size()
    grads = {
        name: (param.grad.full_tensor() if isinstance(param.grad, DTensor) else param.grad)
        for name, param in model.named_parameters()
    }
    return total, grads, recorder


def difference(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Return the largest difference of an entry of `a` and `b`, relative to the largest entry of that tensor in `b`."""
    assert list(a) == list(b)
    return max(float((a[name] - b[name]).abs().max() / b[name].abs().max()) for name in a)


def compare(
    sharded: Tiny, reference: Tiny, dp: DeviceMesh | None, vocab: int = 24, compiled: bool = False
) -> dict[str, Any]:
    """Return the relative differences of loss and gradients from one process's, in eager and, if `compiled`, compiled
    (then also the compiled graphs' ops)."""
    want, want_grads, _ = run(reference, None, False, vocab)
    seen: dict[str, Any] = {}
    for mode in ("eager", "compiled") if compiled else ("eager",):
        sharded.zero_grad()
        loss, grads, recorder = run(sharded, dp, mode == "compiled", vocab)
        seen[f"{mode} loss"] = float((loss - want).abs() / want)
        seen[f"{mode} gradients"] = difference(grads, want_grads)
    if compiled:
        (forward,), (backward,) = recorder.forward, recorder.backward
        seen["ops"] = ops(forward) + ops(backward)
    return seen


def _two_ranks() -> dict[str, Any]:
    dp = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    seen: dict[str, Any] = {}

    def case(name: str, how: dict[str, Any], **sizes: Any) -> None:
        model = model_of(**sizes)
        sharded = shard(copy.deepcopy(model), dp, **how)
        seen[name] = compare(sharded, model, dp, sizes.get("vocab", 24), compiled=name == "tied")

    case("reshard", {})
    case("keep", {"reshard_after_forward": False})
    case("tied", {}, tied=True)
    case("uneven", {}, vocab=23, hidden=17)
    case("checkpoint around", {"reshard_after_forward": True}, ac="around", tied=True)
    case("checkpoint inside", {}, ac="inside")

    tp_model = model_of()
    tp = copy.deepcopy(tp_model)
    tensor_parallel(tp, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)))
    seen["tensor parallel"] = compare(tp, tp_model, None)

    half = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    theirs = run(shard(model_of(), dp, apply=fsdp2.fully_shard, mp_policy=half), dp, False, 24)
    model = shard(model_of(), dp, mp_policy=half)
    for mode in ("eager", "compiled"):
        model.zero_grad()
        ours = run(model, dp, mode == "compiled", 24)
        seen[f"mixed {mode}"] = {
            "loss": float((ours[0] - theirs[0]).abs() / theirs[0]),
            "gradients": difference(ours[1], theirs[1]),
            "fp32": all(param.grad.dtype == torch.float32 for param in model.parameters()),
        }
    wide = fully_shard(model_of(), dp, mp_policy=fsdp2.MixedPrecisionPolicy(output_dtype=torch.float64))
    seen["output dtype"] = str(wide(*batch(2)).dtype)
    return seen


def _four_ranks(folder: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    seen["hsdp"] = compare(shard(model_of(), hsdp), model_of(), hsdp)

    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = model_of()
    tensor_parallel(model, both["tp"])
    shard(model, both["dp"])
    seen["tp + fsdp"] = compare(model, model_of(), both["dp"])

    theirs = model_of()
    tensor_parallel(theirs, both["tp"])
    shard(theirs, both["dp"], apply=fsdp2.fully_shard)
    pairs = list(zip(model.parameters(), theirs.parameters(), strict=True))
    seen["placements"] = [(str(a.placements), str(b.placements)) for a, b in pairs]
    seen["same shards"] = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            param.add_(index + 1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    state = {"model": theirs.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    theirs.load_state_dict(state["model"])
    seen["checkpoint"] = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)
    with torch.no_grad():
        for param in theirs.parameters():
            param.mul_(-2)
    dcp.save({"model": theirs.state_dict()}, checkpoint_id=f"{folder}/back")
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/back")
    model.load_state_dict(state["model"])
    seen["checkpoint back"] = all(torch.equal(a.to_local(), b.to_local()) for a, b in pairs)

    four = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    uneven = shard(model_of(vocab=22, hidden=9), four)
    seen["uneven"] = compare(uneven, model_of(vocab=22, hidden=9), four, 22, compiled=True)
    seen["rows"] = uneven.embed.weight.to_local().shape[0]
    seen["fewer"] = compare(shard(model_of(), four, reshard_after_forward=2), model_of(), four)
    return seen


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return values_on_ranks(_two_ranks, 2, timeout_s=150)


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values_on_ranks(_four_ranks, 4, str(tmp_path_factory.mktemp("checkpoint")), timeout_s=200)


def check(seen: dict[str, Any], compiled: bool) -> None:
    """Assert the differences that `compare` returned."""
    assert ("compiled loss" in seen) == compiled
    for what in ("eager loss", "eager gradients", *(("compiled loss", "compiled gradients") if compiled else ())):
        assert seen[what] < 1e-5, what


@pytest.mark.parametrize(
    "case", ["reshard", "keep", "tied", "uneven", "checkpoint around", "checkpoint inside", "tensor parallel"]
)
def test_two_ranks_match_one_process(two, case):
    for seen in two:
        check(seen[case], compiled=case == "tied")


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_mixed_precision_matches_fsdp2(two, mode):
    for seen in two:
        mixed = seen[f"mixed {mode}"]
        assert mixed["fp32"]
        assert mixed["loss"] < 1e-3
        assert mixed["gradients"] < 2e-2  # bf16: recomputation and fusion round differently
    assert two[0]["output dtype"] == "torch.float64"


@pytest.mark.parametrize("case", ["hsdp", "tp + fsdp", "uneven", "fewer"])
def test_four_ranks_match_one_process(four, case):
    for seen in four:
        check(seen[case], compiled=case == "uneven")


def test_shards_and_checkpoints_interchange_with_fsdp2(four):
    for seen in four:
        assert all(ours == theirs for ours, theirs in seen["placements"]), seen["placements"]
        assert any("Strided" in ours or "_S" in ours for ours, _ in seen["placements"])
        assert seen["same shards"]
        assert seen["checkpoint"]
        assert seen["checkpoint back"]


def test_ranks_with_different_shards_have_the_same_ops(four):
    assert [seen["rows"] for seen in four] == [6, 6, 6, 4]
    assert all(seen["uneven"]["ops"] == four[0]["uneven"]["ops"] for seen in four)
