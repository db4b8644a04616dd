"""Time all-gathers and reductions of gradients by copies beside those of the process group's library (NCCL).

    torchrun --nproc_per_node 4 benchmarks/copies.py

The functions are compiled, so that a reduction includes all its work in a training step: with the library, a cast and a
reduce-scatter in float32; by copies, an exchange in bfloat16 and the kernel that adds up. Errors are against float64.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor

import overlapc  # noqa: F401  # registers the backend

MIB = 1 << 20
_c10d = torch.ops._c10d_functional
Function = Callable[[Tensor], Tensor]


def gathered(shard: Tensor) -> Tensor:
    """Return all ranks' shards, gathered."""
    return _c10d.wait_tensor(_c10d.all_gather_into_tensor(shard, dist.get_world_size(), dist.group.WORLD.group_name))


def reduced(grad: Tensor) -> Tensor:
    """Return this rank's part of the mean gradient, in float32."""
    ranks, group = dist.get_world_size(), dist.group.WORLD.group_name
    return _c10d.wait_tensor(_c10d.reduce_scatter_tensor(grad.float(), "avg", ranks, group))


def compiled(function: Function, transport: str) -> Function:
    torch._dynamo.reset()
    return torch.compile(function, backend="overlapc", fullgraph=True, options={"transport": transport})


def median_ms(work: Callable[[], object], times: int) -> float:
    """Return the median GPU time of one call of `work` on this rank, among `times` calls back to back."""
    for _ in range(3):
        work()
    found = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        for _ in range(times):
            work()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) / times)
    return sorted(found)[len(found) // 2]


def error(result: Tensor, grad: Tensor) -> float:
    """Return the largest absolute error of this rank's part of the mean, against float64."""
    parts = torch.empty_like(grad)
    dist.all_to_all_single(parts, grad)
    exact = parts.view(dist.get_world_size(), -1).double().mean(0)
    return float((result.double() - exact).abs().max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024], help="unsharded MiB of bf16")
    args = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=timedelta(seconds=60), device_id=device)
    ranks = dist.get_world_size()
    torch.manual_seed(dist.get_rank())
    rows = []
    for mib in args.mib:
        grad = torch.randn(mib * MIB // 2, device=device).bfloat16()
        shard = grad[: grad.numel() // ranks].clone()
        row: list[float] = [mib]
        for function, given in ((gathered, shard), (reduced, grad)):
            for transport in ("nccl", "copy"):
                run = compiled(function, transport)
                result = run(given)
                if function is reduced:
                    row.append(error(result, given))
                row.append(median_ms(lambda run=run, given=given: run(given), 5 if mib > 64 else 20))
        rows.append(row)
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {ranks} x {torch.cuda.get_device_name()}")
        headers = ["MiB", "gather nccl ms", "copy ms", "error nccl", "reduction nccl ms", "error copy", "copy ms"]
        print(tabulate(rows, headers, floatfmt=".4g"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
