"""Train a small Llama with FSDP through overlapc, on any number of ranks.

overlapc run --nproc 2 examples/train_fsdp.py
overlapc run --nproc 8 -o memory_budget=70GiB examples/train_fsdp.py --device cuda
"""

from __future__ import annotations

import argparse
import os

import torch
from torch.distributed import destroy_process_group
from torch.distributed.device_mesh import init_device_mesh

import overlapc
from overlapc.launch import corpus
from overlapc.launch.llama import Llama, LlamaConfig


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(arguments.device, int(os.environ["LOCAL_RANK"]) if arguments.device == "cuda" else None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=("dp",))

    with device:
        model = Llama(LlamaConfig(layers=4))
    model.reset_parameters(seed=0)
    for layer in model.layers:
        overlapc.fully_shard(layer, mesh)
    overlapc.fully_shard(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = torch.compile(model, backend="overlapc", fullgraph=True)

    for tokens, targets in corpus.batches(arguments.steps, batch=2, seq=128, part=rank, parts=world_size):
        loss = step(tokens.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"loss of rank 0: {loss.item():.4f}", flush=True)
    destroy_process_group()


if __name__ == "__main__":
    main()
