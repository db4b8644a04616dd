"""Two GPUs over NCCL, which averages gradients within the reduce-scatter, match one GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from overlapc.parallel import fully_shard
from tests.parallel.tiny import Recorder, Tiny, batch
from tests.ranks import values_on_ranks


def _two_gpus() -> dict[str, Any]:
    torch.cuda.set_device(dist.get_rank())
    mesh = init_device_mesh("cuda", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = Tiny(vocab=23)  # uneven
    sharded = copy.deepcopy(model)
    for layer in sharded.layers:
        fully_shard(layer, mesh)
    fully_shard(sharded, mesh)
    tokens, targets = (each.cuda() for each in batch(4, vocab=23))
    model.cuda()(tokens, targets).backward()
    recorder = Recorder()
    step = torch.compile(sharded, backend=recorder, fullgraph=True)
    rank = dist.get_rank()
    step(tokens.chunk(2)[rank], targets.chunk(2)[rank]).backward()
    scatters = [node for node in recorder.backward[0].graph.nodes if "reduce_scatter" in str(node.target)]
    pairs = zip(sharded.parameters(), model.parameters(), strict=True)
    return {
        "reductions": {node.args[1] for node in scatters},
        "gradients": max(
            float((ours.grad.full_tensor() - theirs.grad).abs().max() / theirs.grad.abs().max())
            for ours, theirs in pairs
        ),
    }


@pytest.mark.gpu(2)
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_two_gpus_match_one():
    for seen in values_on_ranks(_two_gpus, 2, backend="nccl"):
        assert seen["reductions"] == {"avg"}
        assert seen["gradients"] < 1e-5
