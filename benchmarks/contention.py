"""Measure how much collectives and compute slow each other, beside the prediction of the profile.

    torchrun --nproc-per-node 4 benchmarks/contention.py --profile h200-nvlink         # under a minute on 4 GPUs
    torchrun --nproc-per-node 4 benchmarks/contention.py --profile out/h200-nvlink.json --channels 0,16

The shapes are those of Llama-8B steps, not those to which `overlapc calibrate` fits its model. Only kernels that a
collective overlapped for their whole duration count; *points* are percent of the time alone. A case without such a
kernel is an error.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import json
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from overlapc.estimators.calibration.clock import Launch, cache_bytes, clock_for, collective_ns, compute_ns
from overlapc.estimators.calibration.profiled_contention import measured_contention
from overlapc.estimators.calibration.workloads import DTYPES, agreed, calls_for, launcher, world_on
from overlapc.estimators.contention import collective_stretches, compute_stretch, contender_of, traffic_of
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.nccl import MeasuredCollectives
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.schedule.model import Comm, Kind, Node, Work

MIB = 2**20
_LONGEST_S = 100.0  # a run that takes longer prints its stacks and ends
_NAMES = {"bf16": "bfloat16", "fp32": "float32"}
# MiB. They last longer than the kernels beside them, because a collective launched during a kernel waits for the
# last wave of that kernel.
COLLECTIVES = (("all_gather", "bf16", 1664), ("reduce_scatter", "fp32", 1664))


@dataclass(frozen=True)
class Subject:
    """A call, and the node that represents it in a schedule."""

    node: Node
    make: Callable[[], Callable[[], Any]]


def main() -> None:
    args = arguments()
    faulthandler.dump_traceback_later(_LONGEST_S, exit=True)
    rank = int(os.environ["RANK"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    profile = load_profile(args.profile)
    found = []
    for channels in args.channels:
        group = world_on(channels)
        for collective, dtype, mib in COLLECTIVES:
            launch = launcher(collective, group, mib * MIB, DTYPES[dtype], device)
            comm = Comm(
                collective, mib * MIB, "dp", dist.get_world_size(), _NAMES[dtype], channels=channels,
                ranks=tuple(range(dist.get_world_size())),
            )  # fmt: skip
            found += beside(comm, launch, profile, device)
    if rank == 0:
        print(text(found))
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "contention.json").write_text(json.dumps(found, indent=1))
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()
    unseen = [f"{row['beside']} ({row['collective']} of {row['MiB']} MiB)" for row in found if row["slowed"] is None]
    if unseen:
        raise SystemExit(f"rank {rank}: no collective overlapped the whole duration of {', '.join(unseen)}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="h200-nvlink", help="device profile: a name or a file")
    parser.add_argument(
        "--channels", type=lambda text: [int(each) for each in text.split(",")], default=[0],
        help="NCCL channels of the process groups, separated by commas; 0: NCCL's choice",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, help="folder for contention.json")
    return parser.parse_args()


def beside(comm: Comm, launch: Launch, profile: DeviceProfile, device: torch.device) -> list[dict[str, Any]]:
    """Measure every subject beside one collective."""
    clock = clock_for(device)
    alone_ns = agreed(collective_ns(clock, launch, calls_for(comm.bytes, clock)), device)
    start = Node("c", Kind.START, comm.collective, comm=comm)
    start = Node("c", Kind.START, comm.collective, comm=comm, estimate=MeasuredCollectives(profile).estimate(start))
    traffic = traffic_of(start, profile)
    chosen = subjects(device)
    with torch.no_grad():
        calls = {each.node.name: each.make() for each in chosen}
        calls_ns = {name: agreed(compute_ns(clock, call, rounds=1), device) for name, call in calls.items()}
        met = measured_contention(calls, calls_ns, launch, alone_ns, load(device))
    rows = []
    for each in chosen:
        seen, what = met[each.node.name], contender_of(each.node)
        rows.append(
            {
                "collective": comm.collective,
                "MiB": comm.bytes // MIB,
                "channels": comm.channels or None,
                "beside": each.node.name,
                "kind": what.beside.value,
                "alone us": seen.alone_ns / 1e3,
                "slowed": seen.compute,
                "said": compute_stretch(what, [traffic], profile),
                "collective slowed": seen.collective,
                "collective said": collective_stretches(what, [traffic], profile)[0],
                "MHz before": seen.mhz_before,
                "MHz after": seen.mhz,
                "kernel": seen.kernel,
            }
        )
    return rows


def load(device: torch.device) -> Callable[[], None]:
    """Return a call that keeps the device busy for 0.1 s, so that its clock is that of a training step."""
    a = torch.randn(8192, 8192, device=device).bfloat16()
    out = torch.empty_like(a)

    def launch() -> None:
        for _ in range(70):
            torch.mm(a, a, out=out)

    return launch


def subjects(device: torch.device) -> Sequence[Subject]:
    """Return matmuls of forward and backward, attention, and memory-bound kernels."""
    products = [
        ("down", 4096, 14336, 4096), ("up, 2048 tokens", 2048, 4096, 14336), ("q, 2048 tokens", 2048, 4096, 4096),
        ("k, 8192 tokens", 8192, 4096, 1024), ("up, 1024 tokens", 1024, 4096, 14336), ("head", 4096, 4096, 32000),
    ]  # fmt: skip
    gradients = [("weight gradient of up", 14336, 4096, 4096), ("weight gradient of k", 1024, 4096, 4096)]
    found = [product(name, sizes, False, device) for name, *sizes in products]
    found += [product(name, sizes, True, device) for name, *sizes in gradients]
    found += [attention(seq, backward, device) for seq in (2048, 8192) for backward in (False, True)]
    found += [moved(f"add {12 * size} MiB", size * MIB, device) for size in (28, 14, 4, 2)]
    return found


def product(name: str, sizes: Sequence[int], transposed: bool, device: torch.device) -> Subject:
    """Return a matmul; sizes: rows, inner, columns; transposed: as `grad.t() @ x` for a weight's gradient."""
    rows, inner, columns = sizes

    def make() -> Callable[[], Any]:
        def random(*size: int) -> Tensor:
            return torch.randn(size, device=device).bfloat16()

        if transposed:
            return partial(torch.mm, random(inner, rows).t(), random(inner, columns))
        return partial(torch.mm, random(rows, inner), random(columns, inner).t())

    work = Work(2 * rows * inner * columns, 2 * inner * (rows + columns), 2 * rows * columns, "bfloat16")
    return Subject(Node(name, Kind.EXTERN, "mm", work=work), make)


def attention(seq: int, backward: bool, device: torch.device) -> Subject:
    """Return causal attention with 32 query heads and 8 key/value heads of width 128."""

    def make() -> Callable[[], Any]:
        query, key, value = (
            torch.randn(1, heads, seq, 128, device=device).bfloat16().requires_grad_() for heads in (32, 8, 8)
        )
        forward = partial(F.scaled_dot_product_attention, query, key, value, is_causal=True, enable_gqa=True)
        if not backward:
            return forward
        with torch.enable_grad():
            out = forward()
        return partial(torch.autograd.grad, out, (query, key, value), torch.randn_like(out), retain_graph=True)

    flops = 4 * 32 * seq * seq * 128 * (5 if backward else 2) // 2
    op = "attention_backward" if backward else "attention"
    name = f"attention{' backward' if backward else ''}, {seq} tokens"
    return Subject(Node(name, Kind.EXTERN, op, work=Work(flops, 0, 0, "bfloat16")), make)


def moved(name: str, elements: int, device: torch.device) -> Subject:
    """Return `a + b` of `elements` fp32 elements, with other tensors at each call, so that none is in the cache."""

    def make() -> Callable[[], Any]:
        sets = 2 + cache_bytes(device) // (6 * elements)  # twice the cache
        several = [[torch.randn(elements, device=device) for _ in range(3)] for _ in range(sets)]
        turns = itertools.cycle(several)

        def add() -> Any:
            a, b, out = next(turns)
            return torch.add(a, b, out=out)

        return add

    return Subject(Node(name, Kind.KERNEL, "add", work=Work(0, 8 * elements, 4 * elements, "float32")), make)


def text(found: Sequence[dict[str, Any]]) -> str:
    table = [{**row, "kernel": row["kernel"][:40]} for row in found]
    lines = [tabulate(table, headers="keys", floatfmt=".2f")]
    for kind in dict.fromkeys(row["kind"] for row in found):
        errors = [
            100 * abs(row["slowed"] - row["said"]) for row in found if row["kind"] == kind and row["slowed"] is not None
        ]
        if errors:
            lines.append(f"{kind}: half within {statistics.median(errors):.1f} points, all within {max(errors):.1f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
