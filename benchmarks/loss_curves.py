"""Compare losses of the demo's model in bfloat16 over many steps: overlapc's transports beside FSDP2 and its own noise.

    torchrun --nproc_per_node 2 benchmarks/loss_curves.py --steps 500

All systems begin with the same weights and see the same text; gradients are reduced in float32. The distance
of two curves is the mean absolute difference of their losses over 100 steps. Noise is the distance of FSDP2 from itself
when its initial weights are perturbed by 2^-20, relatively (--noise-runs times, each time differently), and when its
blocks are compiled by Inductor: these runs differ by rounding only. With fewer GPUs than ranks, ranks share GPUs, and
gloo replaces NCCL.
"""

from __future__ import annotations

import argparse
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch.distributed.device_mesh import DeviceMesh
from train_systems import build  # beside this file

import overlapc
from overlapc.launch import corpus
from overlapc.launch.llama import LlamaConfig

ROWS, SEQ, WINDOW = 4, 256, 100


def losses(system: str, mesh: DeviceMesh, steps: int, seed: int) -> list[float]:
    """Return each step's loss, averaged over ranks. seed: of the initial weights' perturbation; 0: no perturbation."""
    torch._dynamo.reset()
    device = mesh.device_type
    model = build("overlapc" if system.startswith("overlapc") else system, LlamaConfig(), mesh)
    if seed:
        generator = torch.Generator(device).manual_seed(seed)
        with torch.no_grad():
            for parameter in model.parameters():
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                local.mul_(1 + torch.randn(local.shape, generator=generator, device=device) * 2**-20)
    step = model
    if system.startswith("overlapc-"):
        options = {"transport": system.removeprefix("overlapc-"), "warm_start": False}
        step = torch.compile(model, backend="overlapc", fullgraph=True, options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = []
    for tokens, targets in corpus.batches(steps, ROWS, SEQ, mesh.get_rank(), mesh.size()):
        loss = step(tokens.to(device), targets.to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    all_ = torch.stack(found).float()
    dist.all_reduce(all_)
    if system == "overlapc-copy":
        via = {row.via for graph in overlapc.report().steps[-1].graphs for row in graph.collectives}
        assert via == {"copy"}, via
    return (all_ / mesh.size()).tolist()


def apart(one: list[float], other: list[float]) -> list[float]:
    """Return the mean absolute difference of two loss curves in each window of WINDOW steps."""
    differences = [abs(a - b) for a, b in zip(one, other, strict=True)]
    windows = (differences[at : at + WINDOW] for at in range(0, len(differences), WINDOW))
    return [sum(window) / len(window) for window in windows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--noise-runs", type=int, default=2)
    args = parser.parse_args()
    rank, backend = int(os.environ["LOCAL_RANK"]), "gloo"
    if args.device == "cuda":
        gpus = torch.cuda.device_count()
        torch.cuda.set_device(rank % gpus)
        if gpus < int(os.environ["LOCAL_WORLD_SIZE"]):
            os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        else:
            backend = "nccl"
    dist.init_process_group(backend, timeout=timedelta(seconds=60))
    mesh = dist.device_mesh.init_device_mesh(args.device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    names = ["overlapc-copy", "overlapc-nccl", "compile"]
    plain = losses("eager", mesh, args.steps, 0)
    curves = {name: losses(name, mesh, args.steps, 0) for name in names}
    curves |= {
        f"eager, weights changed {seed}": losses("eager", mesh, args.steps, seed)
        for seed in range(1, args.noise_runs + 1)
    }
    if rank == 0:
        ends = [min(at + WINDOW, args.steps) for at in range(0, args.steps, WINDOW)]
        rows = [["eager (FSDP2)", "loss", *(sum(plain[end - 10 : end]) / 10 for end in ends)]]
        rows += [[name, "from eager", *apart(curve, plain)] for name, curve in curves.items()]
        print(tabulate(rows, ["system", "", *(f"to step {end}" for end in ends)], floatfmt=".5f"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
