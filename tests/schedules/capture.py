"""Capture the corpus: schedules of training steps before any pass, as the backend makes them.

    python tests/schedules/capture.py [CASE ...]

A Llama of four layers on one rank of a fake process group: compiled for the CPU, estimated for H200s. The times in
`llama_8b_fsdp4.*.sched` are not from here: they were captured on 4 H200s.
"""

from __future__ import annotations

import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

import overlapc
from overlapc.launch.llama import Llama, LlamaConfig, tensor_parallel

HERE = Path(__file__).parent
SHAPE = LlamaConfig(dim=1024, layers=4, heads=16, kv_heads=4, ffn=3584, vocab=8192, max_seq=2048)


@dataclass(frozen=True)
class Case:
    """Ranks along each axis."""

    replicas: int = 1
    shards: int = 1
    tp: int = 1


CASES = {"fsdp8": Case(shards=8), "hsdp": Case(2, 4), "tp4": Case(tp=4), "tp_fsdp": Case(shards=4, tp=2)}


def capture(name: str, case: Case) -> None:
    """Write `<name>.forward.sched` and `<name>.backward.sched` beside this file."""
    torch._dynamo.reset()
    shape = (case.replicas, case.shards, case.tp)
    world = case.replicas * case.shards * case.tp
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "dp", "tp"))
    model = Llama(SHAPE)
    model.reset_parameters()
    if case.tp > 1:
        tensor_parallel(model, mesh["tp"])
    if case.shards > 1:
        axes = mesh["dp"] if case.replicas == 1 else mesh["replicate", "dp"]
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
        for module in (*model.layers, model):
            overlapc.fully_shard(module, mesh=axes, mp_policy=policy)
    else:
        model.to(torch.bfloat16)
    tokens = torch.zeros(1, SHAPE.max_seq, dtype=torch.long)
    with tempfile.TemporaryDirectory() as folder:
        options = {"dump": "passes", "dump_dir": folder, "profile": "h200-nvlink", "rank_check": False}
        torch.compile(model, backend="overlapc", options=options)(tokens, tokens).backward()
        for direction in ("forward", "backward"):
            (found,) = Path(folder).rglob(f"{direction}_*/**/01_*.before*")
            (HERE / f"{name}.{direction}.sched").write_text(without_comments(found.read_text(), name, direction))
    dist.destroy_process_group()


def without_comments(text: str, name: str, direction: str) -> str:
    """Origins name files of the machine; the schedule is called by what it is of."""
    text = re.sub(r"  # .*", "", text)
    return re.sub(r"^schedule \S+", f"schedule {name}_{direction}", text)


if __name__ == "__main__":
    for chosen in sys.argv[1:] or CASES:
        capture(chosen, CASES[chosen])
