"""Capture the corpus: schedules of training steps before any pass, as the backend makes them.

    python tests/schedules/capture.py [CASE ...]

Llamas on fake tensors, on rank 0 of a fake process group, estimated for H200s; narrow ones, which communicate more than
they compute, unless the name says otherwise. The times in `llama_8b_fsdp4.*.sched` are not from here: they were
captured on 4 H200s.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlapc
from overlapc.backend import plan_only
from overlapc.config import Config
from overlapc.launch.llama import FeedForward, Llama, LlamaConfig, tensor_parallel

HERE = Path(__file__).parent
NARROW = LlamaConfig(dim=1024, layers=8, heads=16, kv_heads=4, ffn=3584, vocab=8192, max_seq=2048)
POLICY = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)


@dataclass(frozen=True)
class Case:
    """A model, ranks along each axis, and how the one is spread over the other."""

    shape: LlamaConfig
    axes: dict[str, int]
    shard: Callable[[Llama, DeviceMesh], None]


def fsdp(model: Llama, mesh: DeviceMesh) -> None:
    """Parameters over all axes but `tp`; over `tp`, if there is one, heads and feed-forward."""
    names = mesh.mesh_dim_names or ()
    if "tp" in names:
        tensor_parallel(model, mesh["tp"])
    rest = tuple(name for name in names if name != "tp")
    if rest:
        for module in (*model.layers, model):
            overlapc.fully_shard(module, mesh=mesh[rest], mp_policy=POLICY)
    else:
        model.to(torch.bfloat16)


def two_groups(model: Llama, mesh: DeviceMesh) -> None:
    """Attention over one axis, all else over the other: gathers on both queues want the same compute as cover."""
    for layer in model.layers:
        overlapc.fully_shard(layer.attention, mesh=mesh["one"], mp_policy=POLICY)
        overlapc.fully_shard(layer, mesh=mesh["other"], mp_policy=POLICY)
    overlapc.fully_shard(model, mesh=mesh["other"], mp_policy=POLICY)


class Experts(nn.Module):
    """In place of a feed-forward: one expert a rank, an equal number of slots for each, two all-to-alls."""

    def __init__(self, cfg: LlamaConfig, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.count = group, group.size()
        self.router = nn.Linear(cfg.dim, self.count, bias=False)
        self.expert = FeedForward(cfg)

    def forward(self, x: Tensor) -> Tensor:
        """`[batch, seq, dim]` in and out; what finds no slot is left out."""
        tokens = x.flatten(0, 1)
        share, chosen = F.softmax(self.router(tokens).float(), -1).max(-1)
        order = chosen.argsort(stable=True)
        sent = tokens[order]
        got = self.expert(all_to_all_single_autograd(sent, None, None, self.group))
        back = all_to_all_single_autograd(got, None, None, self.group)
        mixed = torch.zeros_like(back).index_copy(0, order, back)
        return (share[:, None].to(x.dtype) * mixed).view_as(x)


def experts(model: Llama, mesh: DeviceMesh) -> None:
    """Attention over all ranks, experts apart over `ep` and sharded over the ranks that hold the same ones."""
    for layer in model.layers:
        layer.feed_forward = Experts(replace(NARROW, ffn=NARROW.ffn // 2), mesh["ep"].get_group())
        overlapc.fully_shard(layer.feed_forward.expert, mesh=mesh["dp"], mp_policy=POLICY)
        overlapc.fully_shard(layer, mesh=mesh["all_ranks"], mp_policy=POLICY)
    overlapc.fully_shard(model, mesh=mesh["all_ranks"], mp_policy=POLICY)


CASES = {
    "fsdp8": Case(NARROW, {"dp": 8}, fsdp),
    "hsdp": Case(NARROW, {"replicate": 2, "dp": 4}, fsdp),
    "tp4": Case(replace(NARROW, layers=16), {"tp": 4}, fsdp),
    "hsdp_tp": Case(NARROW, {"replicate": 2, "dp": 2, "tp": 2}, fsdp),
    "two_groups": Case(NARROW, {"one": 2, "other": 4}, two_groups),
    "moe": Case(NARROW, {"dp": 2, "ep": 4}, experts),
    "llama_8b_copies4": Case(
        LlamaConfig.llama_8b(8, max_seq=1024), {"dp": 4}, fsdp
    ),  # as long communication as compute
    "llama_8b_tp_fsdp": Case(LlamaConfig.llama_8b(32), {"dp": 4, "tp": 2}, fsdp),
    "llama_70b_fsdp64": Case(LlamaConfig.llama_70b(), {"dp": 64}, fsdp),
}


def capture(name: str, case: Case, folder: Path = HERE) -> None:
    """Write `<name>.forward.sched` and `<name>.backward.sched` into a folder."""
    torch._dynamo.reset()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=math.prod(case.axes.values()))
    mesh = init_device_mesh("cpu", tuple(case.axes.values()), mesh_dim_names=tuple(case.axes))
    if "ep" in case.axes:
        mesh._flatten("all_ranks")  # here, as fake tensors cannot
    with FakeTensorMode(allow_non_fake_inputs=True), tempfile.TemporaryDirectory() as dumps:
        model = Llama(case.shape)
        case.shard(model, mesh)
        tokens = torch.zeros(1, case.shape.max_seq, dtype=torch.long)
        # Any one pass: what is kept is the schedule that it was given.
        options = Config(
            dump="passes", dump_dir=dumps, profile="h200-nvlink", rank_check=False, passes="sink_waits", verify=False
        )
        step = torch.compile(model, backend=partial(plan_only, options=options), fullgraph=True)
        step(tokens, tokens).backward()
        for direction in ("forward", "backward"):
            (found,) = Path(dumps).rglob(f"{direction}_*/**/01_*.before*")
            (folder / f"{name}.{direction}.sched").write_text(short(found.read_text(), name, direction))
    dist.destroy_process_group()


def short(text: str, name: str, direction: str) -> str:
    """Without origins, which name files of the machine, columns and fractions of a ns; called by what it is of."""
    text = re.sub(r"  # .*", "", text)
    text = re.sub(r" {2,}", " ", text)
    text = re.sub(r"\b(\d+)\.\d+ns", r"\1ns", text)
    return re.sub(r"^schedule \S+", f"schedule {name}_{direction}", text)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CASES:
        capture(chosen, CASES[chosen])
