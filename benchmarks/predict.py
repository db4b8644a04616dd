"""Compare predictions of collectives, memory and whole training steps with measurements made afterwards.

    torchrun --nproc-per-node 4 benchmarks/predict.py --profile h200-nvlink
    torchrun --nproc-per-node 2 benchmarks/predict.py --device cpu --model tiny --seq 64     # a check that it runs

A case's schedules are fixed when it is compiled, before any of its measurements. Steps are first timed without the
profiler; the profiler then measures every node. Both begin after the device has run steps for `_SETTLE_S`, because a
GPU lowers its clock under sustained load, as in a training job. `--seconds` bounds the run: later cases are left out.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from peak import at_peak
from tabulate import tabulate
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from turns import each_step_ms

import overlapc
from overlapc.estimators.calibration.clock import clock_for, collective_ns, launch_ns
from overlapc.estimators.calibration.workloads import DTYPES, calls_for, launcher
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.nccl import AnalyticCollectives, MeasuredCollectives
from overlapc.estimators.nccl_own import LibraryCollectives
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.launch.demo import DemoConfig, shard
from overlapc.launch.llama import Llama, LlamaConfig, tensor_parallel
from overlapc.report import record
from overlapc.report.compare import graph_text, rows, totals_text
from overlapc.report.held_memory import peaks
from overlapc.report.model import StepRecord
from overlapc.report.record import Report
from overlapc.report.trace_reading import read_trace
from overlapc.schedule.model import Comm, Kind, Node

MIB = 2**20
_STEPS = 8  # profiled steps, and steps whose host time is measured
_TIMED_S = 2.0  # duration of the timed steps
_SETTLE_S = 2.0  # an H200's power limit takes hold after 0.05 to 0.1 s, and its clock swings for about a second
_PROFILED_SETTLE_S = 0.5  # shorter, because it follows the timed steps
_MOST_STEPS = 150  # limit on timed steps, and on steps before them
_STUCK_S = 90.0  # a rank that takes longer for one case prints its stacks and ends


@dataclass(frozen=True)
class Case:
    """One training step. `layers` = 0 takes the command line's value; `seq` divides the command line's (0: by 1)."""

    name: str
    layers: int = 0
    seq: int = 0
    tp: int = 1
    reshard: bool = True
    recompute: bool = False
    passes: str | None = None

    def sizes(self, args: argparse.Namespace) -> tuple[int, int]:
        return self.layers or args.layers, args.seq // (self.seq or 1)


CASES = (  # most informative first: later ones are left out when time runs short. `seq` divides the command line's
    Case("fsdp"),
    Case("fsdp, half the sequence", seq=2),
    Case("tp", tp=-1, layers=4),
    Case("tp 2 x fsdp", tp=2, layers=4),
    Case("fsdp, no reshard", layers=4, reshard=False),
    Case("fsdp, checkpointing", layers=4, recompute=True),
    Case("fsdp, quarter of the sequence", layers=4, seq=4),
    Case("fsdp, program order", passes="none"),
)


def main() -> None:
    args = arguments()
    began = time.monotonic()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = torch.device(args.device)
    if args.device == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    cuda = device.type == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    profile = load_profile(args.profile)
    if args.out and rank == 0:
        args.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"profile": profile.name, "world": world, "steps": []}
    faulthandler.dump_traceback_later(_STUCK_S, exit=True)
    if args.collectives:
        found["collectives"] = collectives(profile, device)
        show(rank, collectives_text(found["collectives"]))
    for case in (case for case in CASES if not args.only or case.name in args.only):
        if agreed_seconds(time.monotonic() - began, device) > args.seconds:
            show(rank, f"{case.name}: left out, {args.seconds} s are over")
            continue
        faulthandler.dump_traceback_later(_STUCK_S, exit=True)  # restarts the countdown
        result, texts = step(case, device, args)
        found["steps"].append(result)
        show(rank, tabulate([result], headers="keys", floatfmt=".3f"))
        show(rank, texts[0])
        if args.out and rank == 0:
            (args.out / f"{file_name(case)}.txt").write_text("\n\n".join(texts))
            (args.out / "predict.json").write_text(json.dumps(found, indent=1))
    show(rank, "\n" + tabulate(found["steps"], headers="keys", floatfmt=".3f"))
    dist.barrier()
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="h200-nvlink", help="device profile: a name or a file")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=("8b", "tiny"), default="8b")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=200.0, help="start no case after this time")
    parser.add_argument("--no-collectives", dest="collectives", action="store_false", help="training steps only")
    parser.add_argument("--only", type=lambda text: text.split(";"), help="cases by name, separated by semicolons")
    parser.add_argument("--out", type=Path, help="folder for predict.json and the record and times of each case")
    return parser.parse_args()


def show(rank: int, text: str) -> None:
    if rank == 0:
        print(text, flush=True)


def agreed_seconds(seconds: float, device: torch.device) -> float:
    """Return the slowest rank's `seconds`, so that all ranks leave out the same cases."""
    slowest = torch.tensor([seconds], device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest.item())


# --- collectives


def collectives(profile: DeviceProfile, device: torch.device) -> list[dict[str, Any]]:
    """Measure collectives at sizes of the tables and between them; return the times beside each estimator's."""
    world, clock = dist.get_world_size(), clock_for(device)
    assert dist.group.WORLD is not None
    sizes = [MIB << power for power in range(11)] if device.type == "cuda" else [2**18, MIB]
    said = {
        "table": MeasuredCollectives(profile),
        "library": LibraryCollectives(),
        "model": AnalyticCollectives(profile),
    }
    found = []
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        for dtype in ("bf16", "fp32"):
            for size in sizes:
                launch = launcher(kind, dist.group.WORLD, size, DTYPES[dtype], device)
                ns = collective_ns(clock, launch, calls_for(size, clock))
                name = {"bf16": "bfloat16", "fp32": "float32"}[dtype]
                node = Node("c", Kind.START, kind, comm=Comm(kind, size, "dp", world, name, tuple(range(world))))
                row: dict[str, Any] = {"collective": kind, "dtype": dtype, "bytes": size, "measured_us": ns / 1e3}
                for who, estimator in said.items():
                    estimate = estimator.estimate(node)
                    row[who] = None if estimate is None else estimate.ns / ns
                found.append(row)
    return found


def collectives_text(found: list[dict[str, Any]]) -> str:
    lines = [tabulate(found, headers="keys", floatfmt=".2f")]
    for who in ("table", "library", "model"):
        errors = [abs(row[who] - 1) for row in found if row.get(who) is not None]
        if errors:
            lines.append(f"{who}: half within {statistics.median(errors):.1%}, all within {max(errors):.0%}")
    return "\n".join(lines)


# --- training steps


def step(case: Case, device: torch.device, args: argparse.Namespace) -> tuple[dict[str, Any], list[str]]:
    """Predict and measure one case; return its figures and its reports (totals, then every node of each graph)."""
    record.clear()
    torch._dynamo.reset()
    gc.collect()
    world = dist.get_world_size()
    cuda = device.type == "cuda"
    layers, seq = case.sizes(args)
    tp = world if case.tp < 0 else case.tp
    shape = LlamaConfig.llama_8b(layers, seq) if args.model == "8b" else LlamaConfig.tiny()
    mesh = init_device_mesh(device.type, (1, world // tp, tp), mesh_dim_names=("replicate", "dp", "tp"))
    before_bytes = torch.cuda.memory_allocated() if cuda else 0
    model, tokens = built(case, shape, mesh, tp, seq, device)
    options = {"profile": args.profile, "measure_matmuls": True}
    if case.passes is not None:
        options["passes"] = case.passes
    run = torch.compile(model, backend="overlapc", fullgraph=True, options=options)
    began = time.monotonic()

    def backward(loss: Tensor) -> None:
        loss.backward()
        model.zero_grad(set_to_none=True)

    def once() -> None:
        backward(run(tokens, tokens))

    once()
    compile_s = time.monotonic() - began
    said = record.report_of_process().steps[0]
    held = at_peak(once) if args.out and cuda else ""
    step_s = seconds_of(once, device)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    settling, steps = steps_in(_SETTLE_S, step_s, device), max(_STEPS, steps_in(_TIMED_S, step_s, device))
    times = timed(once, device, settling, steps)
    peak_bytes = torch.cuda.max_memory_allocated() - before_bytes if cuda else 0
    host_ms = host_times_ms(lambda: run(tokens, tokens), backward, device)
    trace = args.out / "trace.json" if args.out and dist.get_rank() == 0 else None
    with overlapc.report.measure(trace, last=_STEPS) as measured:
        profiled_times = timed(once, device, steps_in(_PROFILED_SETTLE_S, step_s, device), _STEPS)
    assert measured.report is not None
    (seen,) = measured.report.steps
    if args.out:
        keep_rank(args.out, case, seen, {"timed ms": times, "profiled ms": profiled_times})
    if trace is not None:
        keep(case, measured.report, trace, held)
    predicted_ms = said.step_ns / 1e6
    predicted_peak = max(peaks(said.graphs).values())
    step_ms = statistics.median(times)
    result: dict[str, Any] = {
        "case": case.name,
        "layers": layers,
        "seq": seq,
        "predicted_ms": predicted_ms,
        "measured_ms": step_ms,
        "ratio": step_ms / predicted_ms,
        "profiled_ms": statistics.median(profiled_times),
        "host said ms": [None if graph.host_ns is None else round(graph.host_ns / 1e6, 2) for graph in said.graphs],
        "host ms": host_ms,
        "launch us": launch_us(device),
        "predicted_gib": predicted_peak / 2**30,
        "measured_gib": peak_bytes / 2**30,
        "memory_ratio": peak_bytes / predicted_peak,
    }
    every = [row for graph in seen.graphs for row in rows(graph)]
    for kind in ("collective", "kernel", "library call"):
        errors = [abs(row.ratio - 1) for row in every if row.kind == kind and row.ratio is not None]
        result[f"{kind}s off"] = statistics.median(errors) if errors else None
        alone = [abs(ratio - 1) for row in every if row.kind == kind and (ratio := row.alone_ratio) is not None]
        beside = [points for row in every if row.kind == kind and (points := row.slowdown_error) is not None]
        result[f"{kind}s alone off"] = statistics.median(alone) if alone else None
        result[f"{kind}s slowed, points off"] = statistics.median(beside) if beside else None
    result["compute alone"] = sum(row.alone_ns or 0.0 for row in every if row.kind != "collective") / 1e6
    result["compute said"] = sum(row.predicted_ns for row in every if row.kind != "collective") / 1e6
    result["compute seen"] = sum(row.measured_ns or 0.0 for row in every if row.kind != "collective") / 1e6
    result["compile_s"] = compile_s
    return result, [totals_text(seen), *(graph_text(graph) for graph in seen.graphs if graph.measured)]


def seconds_of(once: Callable[[], None], device: torch.device) -> float:
    """Return the seconds of one step until the device is idle, on the slowest rank."""
    synchronize(device)
    dist.barrier()
    began = time.perf_counter()
    once()
    synchronize(device)
    return agreed_seconds(time.perf_counter() - began, device)


def host_times_ms(
    forward: Callable[[], Tensor], backward: Callable[[Tensor], None], device: torch.device
) -> list[float]:
    """Return medians of host time of forward and of backward on the slowest rank; on a CPU, this includes compute."""
    found: list[tuple[float, float]] = []
    for _ in range(_STEPS):
        synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        loss = forward()
        between = time.perf_counter()
        backward(loss)
        found.append((between - began, time.perf_counter() - between))
    synchronize(device)
    return [round(agreed_seconds(statistics.median(each), device) * 1e3, 2) for each in zip(*found, strict=True)]


def launch_us(device: torch.device) -> float:
    """Return the µs of an eager launch on the slowest rank, measured now because the speed of a shared host varies."""
    small = torch.ones(16, device=device)
    return round(agreed_seconds(launch_ns(clock_for(device), lambda: small.add_(1.0)), device) / 1e3, 2)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def steps_in(seconds: float, step_s: float, device: torch.device) -> int:
    """Return the number of steps in `seconds`, at least one; always one on a CPU, whose clock need not settle."""
    if device.type != "cuda":
        return 1
    return max(1, min(_MOST_STEPS, math.ceil(seconds / step_s)))


def keep_rank(folder: Path, case: Case, seen: StepRecord, times_ms: Mapping[str, Sequence[float]]) -> None:
    """Write the step times and node times of every rank, because GPUs of one kind differ in their clocks."""
    data: dict[str, Any] = {how: list(each) for how, each in times_ms.items()}
    data["graphs"] = {
        graph.name: {"step_ns": graph.measured.step_ns, "nodes": graph.measured.nodes, "beside": graph.measured.beside}
        for graph in seen.graphs
        if graph.measured is not None
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{file_name(case)}.rank{dist.get_rank()}.json").write_text(json.dumps(data))


def keep(case: Case, report: Report, trace: Path, held: str) -> None:
    """Write the record, the times of each node in every run, and the allocations at the peak; delete the trace."""
    folder, name = trace.parent, file_name(case)
    report.save(folder / f"{name}.record.json")
    spans = {
        graph: [[[marked.label.node, *each] for marked in run for each in marked.work] for run in runs]
        for graph, runs in read_trace(trace).runs.items()
    }
    (folder / f"{name}.spans.json").write_text(json.dumps(spans))
    (folder / f"{name}.memory.txt").write_text(held)
    trace.unlink()


def file_name(case: Case) -> str:
    return case.name.replace(" ", "_").replace(",", "")


def built(
    case: Case, shape: LlamaConfig, mesh: Any, tp: int, seq: int, device: torch.device
) -> tuple[torch.nn.Module, Tensor]:
    """Return the sharded model, with bf16 compute and fp32 reduction, and its tokens."""
    with torch.device(device):
        model = Llama(shape)
    model.reset_parameters(0)
    if tp > 1:
        tensor_parallel(model, mesh["tp"])
    if case.recompute:
        for number, layer in enumerate(model.layers):
            model.layers[number] = Recomputed(layer)
    shard("overlapc", model, DemoConfig(mesh.size(), device.type, "bf16", tp, reshard=case.reshard), mesh)
    return model, torch.randint(0, shape.vocab, (1, seq), device=device)


class Recomputed(torch.nn.Module):
    """A block whose activations are recomputed in backward."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: Tensor) -> Tensor:
        return checkpoint(self.inner, *args, use_reentrant=False)


def timed(once: Callable[[], None], device: torch.device, settling: int, steps: int) -> list[float]:
    """Return the milliseconds of each of `steps` steps, after `settling` others."""
    dist.barrier()
    for _ in range(settling):
        once()
    return each_step_ms(once, steps, device.type)


if __name__ == "__main__":
    main()
