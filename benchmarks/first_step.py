"""Time the first training step of a sharded model of another author, cold and warm, beside FSDP2 + compile by blocks.

    python benchmarks/first_step.py                                     # a narrow Llama, 2 ranks on CPU
    python benchmarks/first_step.py --model gpt2-medium                 # another model of huggingface_models.py
    python benchmarks/first_step.py --fake                              # only the first rank, without communication
    python benchmarks/first_step.py --device cuda --wide                # 1B parameters, 2 GPUs
    python benchmarks/first_step.py --systems overlapc --breakdown      # where the time goes, by phase and by file

*cold* is the first step with empty cache folders, *warm* the same in new processes with the caches that the first ones
filled. Both begin when the model is sharded and on its device, and after one collective and one matrix product; they
end with the optimizer's step. On GPUs eager runs before all others, so that CUDA's libraries are in the page cache.
`cpu s` is the CPU time of the first rank's process and its children, which other work on the machine disturbs less.
`eager` (FSDP2 without a compiler) is the floor: a first step without compilation.

With --fake and torch 2.11 only the first loss says anything: that torch's fake process group leaves the results of
reduce-scatters as they were allocated, so the parameters are updated by what was in that memory.
"""

from __future__ import annotations

import argparse
import compileall
import contextlib
import cProfile
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from caches import environment_with_caches
from huggingface_models import CASES, sharded
from sampled import PHASES, Sampled
from tabulate import tabulate

ROOT = Path(__file__).resolve().parent.parent
SYSTEMS = ("overlapc", "compile", "eager")


def main() -> None:
    args = arguments()
    if args.worker:
        found = measure(args)
        if args.rank == 0:
            print("RESULT " + json.dumps(found))
        return
    for folder in ("overlapc", "passes", "estimators", "launch"):
        compileall.compile_dir(ROOT / folder, quiet=1)  # an installed package has its bytecode
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    if args.device == "cuda":  # else the first system alone would wait until CUDA's libraries are read from disk
        with tempfile.TemporaryDirectory(prefix="first_step") as folder:
            run("eager", "cold", Path(folder), args)
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="first_step") as folder:
            for system in args.systems.split(","):
                for start in ("cold", "warm"):
                    result = run(system, start, Path(folder) / system, args)
                    found.setdefault((system, start), []).append(result)
                    print(
                        f"{system} {start}: {result['first_s']:.2f} s", file=sys.stderr, flush=True
                    )  # in case of a cut
    show(args, found)


def show(args: argparse.Namespace, found: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """Print the seconds of each system and, for the last round, their breakdown."""
    last = next(iter(found.values()))[-1]
    size = f"{args.layers} layers, {last['parameters'] / 1e6:.0f}M parameters"
    print(f"{args.model}, {size}, {args.nproc} ranks, {last['on']}")
    medians = {
        at: {name: statistics.median(run[name] for run in runs) for name in ("first_s", "cpu_s")}
        for at, runs in found.items()
    }
    rows = []
    for (system, start), times in medians.items():
        theirs = medians.get(("compile", start))
        ratios = ["" if theirs is None else f"{times[name] / theirs[name]:.2f}" for name in ("first_s", "cpu_s")]
        result = found[system, start][-1]
        rows.append(
            [system, start, times["first_s"], ratios[0], times["cpu_s"], ratios[1], result["step_s"], result["losses"]]
        )
    headers = ["system", "", "first step s", "/ compile", "cpu s", "/ compile", "later step s", "losses"]
    print(tabulate(rows, headers, floatfmt=".2f"))
    if args.breakdown:
        phases = [[*at, *runs[-1]["sampled"].values()] for at, runs in found.items()]
        print("\nseconds by sampling, first rank\n" + tabulate(phases, ["system", "", *PHASES], floatfmt=".2f"))
    for (system, start), runs in found.items():
        for what in ("phases", "counters", "files"):
            if table := runs[-1].get(what):
                print(f"\n{system}, {start}, {what}:")
                print(tabulate(table.items(), floatfmt=".2f", tablefmt="plain"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--nproc", type=int, default=2, help="ranks, one per GPU (default: %(default)s)")
    parser.add_argument("--fake", action="store_true", help="run the first rank alone, over torch's fake process group")
    parser.add_argument("--model", choices=sorted(CASES), default="llama-1b", help="(default: %(default)s)")
    parser.add_argument("--layers", type=int, help="number of layers (default: as many as the model has)")
    parser.add_argument("--wide", action="store_true", help="in the size that people train (default: narrow)")
    parser.add_argument("--systems", default="overlapc,compile", help=f"some of {', '.join(SYSTEMS)}")
    parser.add_argument("--rounds", type=int, default=1, help="pairs of cold and warm starts, each with new folders")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds a process may take")
    parser.add_argument("--profile", type=Path, help="write cProfile files PROFILE.<system>.<start> of the first rank")
    parser.add_argument("--breakdown", action="store_true", help="sample stacks and print the time of each phase")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.layers = CASES[args.model].layers if args.layers is None else args.layers
    return args


def run(system: str, start: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks of one start of `system` with that system's cache folders; return the first rank's results."""
    folder.mkdir(exist_ok=True)
    given = {
        **environment_with_caches(folder),
        "OVERLAPC_RANK_CHECK": "0" if args.fake else "1",
        "FIRST_STEP_STORE": str(folder / f"store_{start}"),
    }
    command = [sys.executable, __file__, "--worker", system]
    for name in ("model", "device", "nproc", "layers"):
        command += [f"--{name}", str(getattr(args, name))]
    command += [f"--{name}" for name in ("wide", "fake") if getattr(args, name)]
    ranks = []
    for rank in range(1 if args.fake else args.nproc):
        asked = ["--rank", str(rank)]
        if rank == 0:
            asked += ["--breakdown"] if args.breakdown else []
            asked += ["--profile", f"{args.profile}.{system}.{start}"] if args.profile else []
        pipe = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        ranks.append(subprocess.Popen(command + asked, env=given, stdout=pipe, stderr=pipe, text=True))
    try:
        out, errors = ranks[0].communicate(timeout=args.timeout)
    finally:
        for each in ranks:
            with contextlib.suppress(subprocess.TimeoutExpired):
                each.wait(timeout=5)
            each.kill()
    found = [line for line in out.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise SystemExit(f"{system} failed ({ranks[0].returncode}):\n{out}\n{errors}")
    result: dict[str, Any] = json.loads(found[0].removeprefix("RESULT "))
    return result


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure the first step and a later one on this rank."""
    import torch
    import torch.distributed as dist
    from torch import nn

    import overlapc
    from overlapc.report.captures import CAPTURES

    if args.fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        store: Any = FakeStore()
    else:
        store = dist.FileStore(os.environ["FIRST_STEP_STORE"], args.nproc)
    device = torch.device(args.device, args.rank) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    backend = "fake" if args.fake else "nccl" if args.device == "cuda" else "gloo"
    own = device if backend == "nccl" else None
    dist.init_process_group(backend, store=store, rank=args.rank, world_size=args.nproc, device_id=own)
    case = CASES[args.model]
    shape = case.shape(not args.wide, args.layers)
    model = sharded(case, shape, args.device, compile_blocks=args.worker == "compile")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = case.inputs(shape, *(case.batch if args.wide else (1, 16)), args.device)
    begun = torch.ones(64, 64, device=device, requires_grad=True)
    (begun @ begun).sum().backward()
    dist.all_reduce(begun.grad)
    call: Any = model

    def step() -> float:
        loss = call(**inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    # Imports parts of torch, which takes two seconds. Compiling by blocks has already imported them, so that these
    # seconds would count for one system only.
    torch.compile(nn.Identity(), backend="eager")

    sampled = Sampled(clock=time.perf_counter if args.device == "cuda" else time.process_time)
    watched: contextlib.AbstractContextManager[Any] = sampled if args.breakdown else contextlib.nullcontext()
    if args.profile:
        watched = cProfile.Profile()
    dist.barrier()
    began, cpu_began = time.perf_counter(), sum(os.times()[:4])
    with watched:
        if args.worker == "overlapc":
            call = torch.compile(overlapc.adopt_fsdp2(model), backend="overlapc")
        losses = [step()]
    first, cpu = time.perf_counter() - began, sum(os.times()[:4]) - cpu_began
    if args.profile:
        watched.dump_stats(args.profile)  # type: ignore[attr-defined]
    phases = dict(CAPTURES.seconds())
    later = []
    for _ in range(3):
        began = time.perf_counter()
        losses.append(step())
        later.append(time.perf_counter() - began)
    dist.destroy_process_group()
    return {
        "first_s": first,
        "cpu_s": cpu,
        "step_s": min(later),
        "losses": " ".join(f"{loss:.4f}" for loss in losses),
        "parameters": sum(each.numel() for each in model.parameters()),
        "phases": {**phases, "all else": first - sum(phases.values())} if args.worker == "overlapc" else {},
        "counters": dict(torch._dynamo.utils.counters["overlapc"]),
        "sampled": sampled.seconds() if args.breakdown else {},
        "files": sampled.details(40) if args.breakdown else {},
        "on": f"torch {torch.__version__}, {torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}",
    }


if __name__ == "__main__":
    main()
