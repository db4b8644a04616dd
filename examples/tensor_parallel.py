"""Llama parallelized like in torchtitan: tensor and sequence parallelism, FSDP2, activation checkpoints, one compiled
model.

overlapc run --nproc 2 examples/tensor_parallel.py     tensor parallelism over both ranks
overlapc run --nproc 4 examples/tensor_parallel.py     2 x 2: FSDP2 over the other axis
"""

from __future__ import annotations

import torch
from common import Arguments, losses_of, main
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard

import overlapc
from overlapc.launch.llama import Llama, LlamaConfig, tensor_parallel


def train(args: Arguments) -> list[float]:
    """Train, and return the losses of this rank."""
    mesh = args.mesh(dp=-1, tp=2)
    with torch.device(args.device):
        llama = Llama(LlamaConfig.tiny())
    llama.reset_parameters(seed=0)
    tensor_parallel(llama, mesh["tp"])
    for name, layer in llama.layers.named_children():
        llama.layers.register_module(name, checkpoint_wrapper(layer))
    model: nn.Module = llama
    if mesh["dp"].size() > 1:
        for layer in llama.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(llama, mesh=mesh["dp"])
        model = llama if args.eager else overlapc.adopt_fsdp2(llama)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)  # parameters are on two meshes
    step = args.compile(model)

    # Ranks of one tensor-parallel group train on the same rows.
    seeds = (100 * number + mesh.get_local_rank("dp") for number in range(args.steps))
    return losses_of(step, optimizer, (args.tokens(vocabulary=64, length=32, seed=seed) for seed in seeds))


if __name__ == "__main__":
    main(train, __doc__)
