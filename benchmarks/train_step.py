"""Forward + backward of a Llama on 1 to N GPUs: overlapc beside eager FSDP2, FSDP2 + compile, and Inductor.

    torchrun --nproc-per-node 4 benchmarks/train_step.py --layers 8 --seq 4096
    python benchmarks/train_step.py --model demo --systems overlapc,eager --profile
    torchrun --nproc-per-node 2 benchmarks/train_step.py --device cpu --model tiny --systems overlapc,inductor-raise

All systems start from the same weights and see the same tokens. Timing rounds alternate between the systems, so that
drift of the machine touches all alike; the table shows medians of this one run. peak_gib holds all systems' models,
alone_gib is the peak less what belongs to the other systems. `--parity` also runs an fp32
reference and compares every gradient's error with eager's. `--profile` adds kernel times from the profiler. What the
systems named inductor-* are: inductor_systems.py. On CPUs (gloo) it shows that they run and agree, not how fast.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate
from torch import Tensor
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import overlapc
from overlapc.launch.llama import Llama, LlamaConfig

SYSTEMS = (
    *("overlapc", "overlapc-none", "overlapc-tuned", "eager", "compile"),
    *("inductor", "inductor-raise", "inductor-overlap", "inductor-manual"),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "overlapc": {},
    "overlapc-none": {"passes": "none"},
    "overlapc-tuned": {"autotune": True},
}
Step = Callable[[Tensor, Tensor], Tensor]


def main() -> None:
    args = arguments()
    torch._dynamo.config.recompile_limit = 64  # every system compiles the same code objects anew
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29517")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    else:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    mesh = init_device_mesh(args.device, (world,), mesh_dim_names=("dp",))
    shape = MODELS[args.model](args)
    torch.manual_seed(1 + rank)
    tokens = torch.randint(0, shape.vocab, (args.batch, args.seq), device=args.device)
    targets = tokens.roll(-1, 1)
    systems = args.systems.split(",")
    results: dict[str, dict[str, Any]] = {}
    reference = gradients(build("reference", shape, mesh), tokens, targets) if args.parity else None
    runs: dict[str, tuple[Llama, Step]] = {}
    for system in systems:
        model = build(system, shape, mesh)
        step = compiled(system, model)
        began = time.perf_counter()
        try:
            loss, grads = gradients((model, step), tokens, targets)
        except BackendCompilerFailed as error:  # of one system among others: that is its result
            if len(systems) == 1:
                raise
            results[system] = {"failed": str(error).strip().splitlines()[0][:80]}
            continue
        results[system] = {"first_step_s": time.perf_counter() - began, "loss": loss}
        if reference is not None:
            results[system].update(errors(grads, reference[1]), loss_error=abs(loss - reference[0]) / abs(reference[0]))
        del grads
        runs[system] = (model, step)
    del reference
    systems = list(runs)
    times: dict[str, list[float]] = {system: [] for system in systems}
    for round_number in range(args.rounds + 1):  # the first is a warm-up
        for system in systems:
            if args.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
                others = torch.cuda.memory_allocated() - own_bytes(runs[system][0])
            taken = timed(runs[system], tokens, targets, args.steps)
            if round_number:
                times[system] += taken
            if args.device == "cuda":
                results[system]["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                results[system]["alone_gib"] = (torch.cuda.max_memory_allocated() - others) / 2**30
            runs[system][0].zero_grad(set_to_none=True)
    for system in systems:
        results[system]["step_ms"] = statistics.median(times[system])
        results[system]["min_ms"] = min(times[system])
        if args.profile and system.startswith("overlapc"):
            with overlapc.report.measure():  # the record then holds every node's time beside its prediction
                for _ in range(3):
                    runs[system][1](tokens, targets).backward()
                    runs[system][0].zero_grad(set_to_none=True)
        if args.profile:
            spans = kernel_spans(runs[system], tokens, targets)
            results[system].update(kernel_times(spans))
            if args.out and rank == 0:
                args.out.mkdir(parents=True, exist_ok=True)
                (args.out / f"kernels_{system}.json").write_text(json.dumps(spans))
    if rank == 0:
        print(
            f"torch {torch.__version__}, {world} x {torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}"
        )
        print(f"{shape}, sequence {args.seq} x {args.batch}")
        columns = list(dict.fromkeys(name for result in results.values() for name in result))
        rows = [[system, *(result.get(name) for name in columns)] for system, result in results.items()]
        print(tabulate(rows, ["system", *columns], floatfmt=".4g"))
        print("counters:", dict(torch._dynamo.utils.counters["overlapc"]))
        if args.out:
            args.out.mkdir(parents=True, exist_ok=True)
            (args.out / "train_step.json").write_text(json.dumps(results, indent=1))
            if any(system.startswith("overlapc") for system in systems):
                overlapc.report().save(args.out / "record.json")
                (args.out / "report.txt").write_text(str(overlapc.report()))
    dist.barrier()
    dist.destroy_process_group()


MODELS: dict[str, Callable[[argparse.Namespace], LlamaConfig]] = {
    "8b": lambda args: LlamaConfig.llama_8b(args.layers, args.seq),
    "demo": lambda args: LlamaConfig(max_seq=args.seq),
    "tiny": lambda args: LlamaConfig(dim=64, layers=args.layers, heads=4, kv_heads=2, ffn=128, max_seq=args.seq),
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=MODELS, default="8b", help="Llama-8B shape, the demo's, or a tiny one")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096, help="tokens a row")
    parser.add_argument("--batch", type=int, default=1, help="rows a GPU")
    parser.add_argument("--steps", type=int, default=5, help="timed steps a round")
    parser.add_argument("--rounds", type=int, default=4, help="timed rounds, systems alternating")
    parser.add_argument("--systems", default="overlapc,eager,compile", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument("--parity", action="store_true", help="errors against an fp32 reference")
    parser.add_argument("--profile", action="store_true", help="kernel times from the profiler")
    parser.add_argument("--out", type=Path, help="folder for train_step.json, record.json, report.txt")
    return parser.parse_args()


def build(system: str, shape: LlamaConfig, mesh: DeviceMesh) -> Any:
    """The model sharded as the system wants it; bf16 compute, fp32 reduction (the reference: fp32 throughout)."""
    with torch.device(mesh.device_type):
        model = Llama(shape)
    model.reset_parameters(0)
    with torch.no_grad():  # the same rounded weights everywhere, so that errors are those of the computation
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    if mesh.size() == 1:
        if system != "reference":
            for module in model.modules():
                for name, parameter in list(module._parameters.items()):
                    if parameter is not None:
                        module._parameters[name] = torch.nn.Parameter(parameter.detach().to(torch.bfloat16))
        return (model, model) if system == "reference" else model
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
    if system == "reference":
        policy = MixedPrecisionPolicy()
    shard = fsdp.fully_shard if system in ("reference", "eager", "compile") else overlapc.fully_shard
    for layer in model.layers:
        if system == "compile":
            layer.compile()
        shard(layer, mesh=mesh, mp_policy=policy)
    shard(model, mesh=mesh, mp_policy=policy)
    return (model, model) if system == "reference" else model


def compiled(system: str, model: Llama) -> Step:
    if system in OPTIONS:
        return torch.compile(model, backend="overlapc", fullgraph=True, options=OPTIONS[system])
    if system.startswith("inductor"):
        from inductor_systems import compiled_by_inductor  # beside this file; the others need nothing of Inductor

        return compiled_by_inductor(system, model)
    if system == "compile" and not dist.get_world_size() > 1:
        return torch.compile(model, fullgraph=True)
    return model


def gradients(run: tuple[Llama, Step], tokens: Tensor, targets: Tensor) -> tuple[float, list[Tensor]]:
    model, step = run
    loss = step(tokens, targets)
    loss.backward()
    grads = [local(parameter.grad).float() for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return loss.item(), grads


def own_bytes(model: torch.nn.Module) -> int:
    """Of parameters and buffers on this GPU; gradients are gone when it is asked."""
    held = (local(tensor) for tensor in (*model.parameters(), *model.buffers()))
    return sum(tensor.untyped_storage().nbytes() for tensor in held)


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def errors(grads: list[Tensor], reference: list[Tensor]) -> dict[str, float]:
    """Relative error of the gradients, all together and the worst parameter's."""
    each = [((a - b).norm() / b.norm()).item() for a, b in zip(grads, reference, strict=True)]
    whole = sum((a - b).square().sum().item() for a, b in zip(grads, reference, strict=True))
    norm = sum(b.square().sum().item() for b in reference)
    return {"grad_error": (whole / norm) ** 0.5, "worst_grad_error": max(each)}


def timed(run: tuple[Llama, Step], tokens: Tensor, targets: Tensor, steps: int) -> list[float]:
    """Milliseconds of each step, by CUDA events or the host's clock."""
    model, step = run

    def once() -> None:
        step(tokens, targets).backward()
        model.zero_grad(set_to_none=True)

    dist.barrier()
    once()
    if tokens.device.type == "cpu":
        clock = [time.perf_counter()]
        for _ in range(steps):
            once()
            clock.append(time.perf_counter())
        return [(after - before) * 1e3 for before, after in itertools.pairwise(clock)]
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        once()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in itertools.pairwise(marks)]


PROFILED_STEPS = 2


def kernel_spans(run: tuple[Llama, Step], tokens: Tensor, targets: Tensor) -> list[tuple[str, int, int]]:
    """(name, start, end) in ns of every kernel and copy of PROFILED_STEPS steps."""
    from torch.profiler import ProfilerActivity, profile

    model, step = run
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(PROFILED_STEPS):
            step(tokens, targets).backward()
            model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
    return [
        (event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in recorded.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]


def kernel_times(spans: list[tuple[str, int, int]]) -> dict[str, float]:
    """Milliseconds a step: compute kernels, NCCL kernels, NCCL while no compute runs, neither."""
    nccl = merged([(start, end) for name, start, end in spans if "nccl" in name.lower()])
    compute = merged([(start, end) for name, start, end in spans if "nccl" not in name.lower()])
    both = merged(compute + nccl)
    whole = max(end for _, end in both) - min(start for start, _ in both)
    busy, computing = total(both), total(compute)
    scale = 1e6 * PROFILED_STEPS
    return {
        "compute_ms": computing / scale,
        "nccl_ms": total(nccl) / scale,
        "exposed_ms": (busy - computing) / scale,
        "idle_ms": (whole - busy) / scale,
    }


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    result: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((start, end))
    return result


def total(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


if __name__ == "__main__":
    sys.exit(main())
