"""Forward + backward of a Llama on 1 to N GPUs: overlapc beside eager FSDP2, FSDP2 + compile, and Inductor.

    python benchmarks/train_step.py --layers 8 --seq 4096
    python benchmarks/train_step.py --model demo --systems overlapc,eager --profile
    python benchmarks/train_step.py --systems all --profile --seconds 280 --out out
    python benchmarks/train_step.py --tp 2 --batch 2 --systems overlapc,overlapc-nccl,eager,compile
    python benchmarks/train_step.py --layers 32 --vocab 128256 --adamw --rounds 2
    python benchmarks/train_step.py --device cpu --nproc 2 --model tiny --systems overlapc,inductor-raise

All systems start from the same weights and see the same tokens. Each runs in its own processes, one per GPU, and only
one system at a time: timing rounds alternate between the systems, so that drift of the machine affects all alike, and
the table shows medians of this one run. A system that fails, or does not answer in time, loses only its own row.
Systems that measure on the device while they compile do so alone; the others compile at the same time.

`--seconds` bounds the whole run: first steps, then rounds and profiles while there is time. `--parity` also runs an
fp32 reference and compares every gradient's error with eager's. `--profile` adds kernel times from the profiler. The
systems are described in train_systems.py. On CPUs (gloo) the run shows that they work and agree, not how fast they are.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from train_systems import MODELS, REFERENCE, SYSTEMS, serve, shape_of  # these two are beside this file
from turns import Turns

# These compile alone: they measure on the device while they compile, or other systems need their output.
ALONE = (
    *(REFERENCE, "inductor-overlap"),
    *("overlapc", "overlapc-nccl", "overlapc-copy", "overlapc-budget", "overlapc-compute", "overlapc-none"),
    *("overlapc-tuned", "overlapc-dtensors"),
)
ENVIRONMENT = {"compile-16ctas": {"NCCL_MAX_CTAS": "16"}, "compile-8ctas": {"NCCL_MAX_CTAS": "8"}}


class Clock:
    """How much of `--seconds` is left."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._until = time.monotonic() + args.seconds
        self._turn_s: float = args.turn_seconds

    def left_s(self) -> float:
        """Return the seconds until the end of the run."""
        return self._until - time.monotonic()

    def turn_s(self) -> float:
        """Return the seconds that a turn may take."""
        return min(self._turn_s, max(5.0, self.left_s()))


def main() -> None:
    args = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")  # for each rank of each system
    with tempfile.TemporaryDirectory() as kept:
        if args.out is not None:
            args.out.mkdir(parents=True, exist_ok=True)
        turns = Turns(args.nproc, args.out or Path(kept), partial(serve, args, Path(kept)))
        try:
            results = measure(turns, Clock(args), args)
        finally:
            turns.end()
    show(args, results)


def measure(turns: Turns, clock: Clock, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Take first steps, then timed rounds, then profiles; write the results so far after each turn."""
    systems = [REFERENCE, *args.systems] if args.parity else args.systems
    results: dict[str, dict[str, Any]] = {system: {} for system in systems}

    def take(turn: str, *subjects: str) -> None:
        for system, found in turns.take(turn, subjects, clock.turn_s()).items():
            times = found.pop("times_ms", [])
            results[system] |= found
            if times and system in timed:
                timed[system] += times
                results[system] |= {"step_ms": statistics.median(timed[system]), "min_ms": min(timed[system])}
        for system, why in turns.failed.items():
            results[system]["failed"] = why
        keep(args, results)

    timed: dict[str, list[float]] = {}
    for system in systems:
        turns.begin(system, ENVIRONMENT.get(system, {}) | _budget(system, args.memory_budget))
    for system in systems:  # one after the other: a whole model takes memory until it is sharded
        take("build", system)
    for system in systems:
        if system in ALONE:
            take("first", system)
    if args.parity:
        turns.stop(REFERENCE)
        del results[REFERENCE]
    take("first", *(system for system in systems if system not in ALONE))
    begun = time.monotonic()
    for number in range(args.rounds + 1):  # the first is a warm-up
        if number == 1:
            timed |= {system: [] for system in turns.alive(systems)}
        a_round_s = (time.monotonic() - begun) / max(1, number)
        if number > 1 and clock.left_s() < a_round_s * (4 if args.profile else 1):
            print(f"no time for more than {number - 1} rounds", file=sys.stderr)
            break
        for system in turns.alive(systems):
            take("time", system)
    for system in turns.alive(systems) if args.profile else ():
        if clock.left_s() > 5:
            take("profile", system)
        else:
            print(f"no time to profile {system}", file=sys.stderr)
    return results


def _budget(system: str, memory_budget: str | None) -> dict[str, str]:
    """Return the environment variable that sets the memory budget of `system`, if it has one."""
    return {"OVERLAPC_MEMORY_BUDGET": memory_budget} if system == "overlapc-budget" and memory_budget else {}


def keep(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """Write the results so far to `args.out`, in case the run is cut off."""
    if args.out is not None:
        (args.out / "train_step.json").write_text(json.dumps(results, indent=1))


def show(args: argparse.Namespace, results: dict[str, dict[str, Any]]) -> None:
    """Print the table."""
    keep(args, results)
    what = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, {args.nproc} x {what}")
    print(f"{shape_of(args)}, sequence {args.seq} x {args.batch}, tp {args.tp}")
    print("forward + backward + AdamW" if args.adamw else "forward + backward")
    columns = list(dict.fromkeys(name for result in results.values() for name in result))
    rows = [[system, *(result.get(name) for name in columns)] for system, result in results.items()]
    print(tabulate(rows, ["system", *columns], floatfmt=".4g"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nproc", type=int, help="ranks (default: one per GPU; 2 on CPUs)")
    parser.add_argument("--model", choices=MODELS, default="8b", help="Llama-8B shape, the demo's, or a tiny one")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, help="size of the vocabulary (default: the model's)")
    parser.add_argument("--adamw", action="store_true", help="steps include fused AdamW, without clipping")
    parser.add_argument("--seq", type=int, default=4096, help="tokens per row")
    parser.add_argument("--batch", type=int, default=1, help="rows per GPU, or per group of --tp ranks")
    parser.add_argument("--tp", type=int, default=1, help="degree of tensor parallelism: ranks that share every layer")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=4, help="timed rounds, systems alternating")
    parser.add_argument("--seconds", type=float, default=560, help="limit for the whole run (default: %(default)g)")
    parser.add_argument("--turn-seconds", type=float, default=150, help="limit for a turn (default: %(default)g)")
    parser.add_argument("--systems", default="overlapc,eager,compile", help=f"all, or some of {', '.join(SYSTEMS)}")
    parser.add_argument("--memory-budget", help="budget of overlapc-budget, such as 12GiB")
    parser.add_argument("--parity", action="store_true", help="errors against an fp32 reference")
    parser.add_argument("--profile", action="store_true", help="kernel times from the profiler")
    parser.add_argument("--out", type=Path, help="folder for train_step.json, records, reports and logs")
    args = parser.parse_args()
    args.systems = list(SYSTEMS) if args.systems == "all" else args.systems.split(",")
    if unknown := [system for system in args.systems if system not in SYSTEMS]:
        parser.error(f"no system named {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    if "overlapc-budget" in args.systems and not args.memory_budget:
        parser.error("overlapc-budget needs --memory-budget")
    if args.nproc is None:
        args.nproc = torch.cuda.device_count() if args.device == "cuda" else 2
    if args.nproc % args.tp:
        parser.error(f"--tp {args.tp} does not divide {args.nproc} ranks")
    if args.tp > 1 and "overlapc-compute" in args.systems:
        parser.error("overlapc-compute has no communication, which --tp needs")
    return args


if __name__ == "__main__":
    sys.exit(main())
