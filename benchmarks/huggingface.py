"""Time training steps of models as their authors wrote them: FSDP2 with overlapc, with compiled blocks, and eager.

    python benchmarks/huggingface.py --nproc 2
    python benchmarks/huggingface.py --nproc 1 --model vit-large --profile
    python benchmarks/huggingface.py --nproc 2 --breaks                  # with a graph break in each block
    python benchmarks/huggingface.py --device cpu --nproc 2 --tiny --model gemma3-1b --steps 1 --rounds 1

The models are those of huggingface_models.py; most need transformers. Every system has random weights from one seed,
`fully_shard` on every block and on the model (weights in float32, computed in bfloat16, reduced in float32), AdamW
(fused), gradients clipped to norm 1. One system compiles at a time, with empty caches; then rounds of timed steps
alternate between the systems, each in its own processes. Several runs with the same `--lock` file compile at the same
time, but take timed rounds one after the other.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from filelock import FileLock
from huggingface_models import CASES, sharded  # beside this file
from kernel_spans import kernel_times, longest, spans_of, times_by_class
from tabulate import tabulate
from torch import nn
from turns import Turns, answer_on_rank, step_times

import overlapc

SYSTEMS = ("overlapc", "compile", "eager")
LOSSES = 4  # losses of the first steps to print for comparison


class System:
    """A system's model, optimizer and data on this rank; every public method is a turn."""

    def __init__(self, name: str, args: argparse.Namespace) -> None:
        self.name, self.args = name, args

    def build(self) -> dict[str, Any]:
        """Build the sharded model; it compiles at its first step."""
        case = CASES[self.args.model]
        shape = case.shape(self.args.tiny)
        model = sharded(case, shape, self.args.device, self.name == "compile", self.args.breaks)
        self.call: Callable[..., Any] = model
        if self.name == "overlapc":
            self.call = torch.compile(overlapc.adopt_fsdp2(model), backend="overlapc")
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        torch.manual_seed(1 + dist.get_rank())
        self.inputs = case.inputs(shape, self.args.batch, self.args.seq, self.args.device)
        return {"parameters": sum(each.numel() for each in model.parameters())}

    def first(self) -> dict[str, Any]:
        """Run the first steps, the first of which compiles."""
        began = time.perf_counter()
        losses = [self.once().item()]
        result: dict[str, Any] = {"first_step_s": time.perf_counter() - began}
        losses += [self.once().item() for _ in range(LOSSES - 1)]
        result["losses"] = " ".join(f"{loss:.4f}" for loss in losses)
        if self.name == "overlapc":
            graphs = overlapc.report().steps[0].graphs
            result["said"] = [
                f"{graph.name}: {calls} x {what}" for graph in graphs for what, calls in graph.attention.items()
            ]
            phases = overlapc.report().steps[0].seconds.items()
            result["said"].append(f"compiling, s: {', '.join(f'{name} {seconds:.1f}' for name, seconds in phases)}")
        return result

    def time(self) -> dict[str, Any]:
        """Return the milliseconds of each step, and this GPU's peak memory."""
        return step_times(self.once, self.args.steps, self.args.device)

    def profile(self) -> dict[str, Any]:
        """Return a step's time by class of kernel; write the kernels with the longest total time to `args.out`."""
        spans = spans_of(self.once) if self.args.device == "cuda" else []
        if not spans:
            return {}
        if self.args.out is not None and dist.get_rank() == 0:
            (self.args.out / f"kernels_{self.name}.json").write_text(json.dumps(longest(spans, 60), indent=0))
        return {"classes": kernel_times(spans) | times_by_class(spans)}

    def once(self) -> torch.Tensor:
        """Run one step with its optimizer; return the loss."""
        loss: torch.Tensor = self.call(**self.inputs).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


def serve(args: argparse.Namespace, name: str, rank: int, ranks: int, port: int) -> None:
    """Run a rank of a system: take turns until there are no more."""
    answer_on_rank(lambda: System(name, args), args.device, name, rank, ranks, port)


def main() -> None:
    args = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", "4")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "8")
    until = time.monotonic() + args.seconds
    results: dict[str, dict[str, Any]] = {system: {} for system in args.systems}
    times_ms: dict[str, list[float]] = {system: [] for system in args.systems}
    with tempfile.TemporaryDirectory() as folder:
        caches = {"OVERLAPC_CACHE_DIR": f"{folder}/overlapc", "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        logs = args.out or Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        turns = Turns(args.nproc, logs, partial(serve, args))

        def take(turn: str, system: str) -> None:
            left_s = max(5.0, until - time.monotonic())
            for found in turns.take(turn, [system], left_s).values():
                times_ms[system] += found.pop("times_ms", [])
                results[system] |= found

        try:
            for system in args.systems:
                turns.begin(system, caches)
            for turn in ("build", "first"):
                for system in args.systems:
                    take(turn, system)
            with FileLock(args.lock) if args.lock else nullcontext():
                for number in range(args.rounds + 1):  # the first is a warm-up
                    for system in turns.alive(args.systems):
                        take("time", system)
                    if number == 0:
                        times_ms = {system: [] for system in args.systems}
                for system in turns.alive(args.systems) if args.profile else ():
                    take("profile", system)
        finally:
            turns.end()
        for system, why in turns.failed.items():
            results[system]["failed"] = why
    show(args, results, times_ms)


def show(args: argparse.Namespace, results: dict[str, dict[str, Any]], times_ms: dict[str, list[float]]) -> None:
    import transformers

    what = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {args.nproc} x {what}")
    count = max((result.get("parameters", 0) for result in results.values()), default=0)
    shape = CASES[args.model].shape(args.tiny)
    print(f"{args.model}: {count / 1e6:.0f}M parameters, {dict(shape)}, batch {args.batch} x {args.seq}")
    for system, times in times_ms.items():
        for line in results[system].pop("said", ()):
            print(f"   {line}")
        if times:
            results[system] |= {"step_ms": statistics.median(times), "min_ms": min(times)}
    columns = ("step_ms", "min_ms", "peak_gib", "first_step_s", "losses", "failed")
    rows = [[system, *(result.get(name) for name in columns)] for system, result in results.items()]
    print(tabulate(rows, ["system", *columns], floatfmt=".5g"))
    classes = {system: result["classes"] for system, result in results.items() if "classes" in result}
    if classes:
        kinds = list(dict.fromkeys(kind for times in classes.values() for kind in times))
        print(tabulate([[kind, *(times.get(kind) for times in classes.values())] for kind in kinds],
                       ["ms a step", *classes], floatfmt=".2f"))  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--nproc", type=int, default=2, help="ranks, one per GPU (default: %(default)s)")
    parser.add_argument("--model", choices=CASES, default="llama-1b")
    parser.add_argument("--tiny", action="store_true", help="the same models in their smallest sizes")
    parser.add_argument("--breaks", action="store_true", help="let each block break the graph in its midst")
    parser.add_argument("--seq", type=int, help="tokens per row (default: the model's)")
    parser.add_argument("--batch", type=int, help="rows per GPU (default: the model's)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps per round")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds, systems alternating")
    parser.add_argument("--seconds", type=float, default=330, help="limit for the whole run (default: %(default)g)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), help="some of %(default)s")
    parser.add_argument("--profile", action="store_true", help="also print a step's time by class of kernel")
    parser.add_argument("--lock", type=Path, help="lock file held during timed rounds; runs that share it take turns")
    parser.add_argument("--out", type=Path, help="folder for logs")
    args = parser.parse_args()
    args.systems = args.systems.split(",")
    rows, length = (1, 16) if args.tiny else CASES[args.model].batch
    args.batch, args.seq = args.batch or rows, args.seq or length
    if unknown := [system for system in args.systems if system not in SYSTEMS]:
        parser.error(f"no system named {', '.join(unknown)}; there are {', '.join(SYSTEMS)}")
    return args


if __name__ == "__main__":
    sys.exit(main())
