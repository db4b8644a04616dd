"""Cold and warm compile times of a Llama, ours beside Inductor's, in fresh processes, systems alternating.

    python benchmarks/compile_time.py                                  # small width, CPU
    python benchmarks/compile_time.py --device cuda --model 8b         # Llama-8B shape, 8 layers, one GPU

*cold* is the first forward + backward with an empty cache folder, *warm* the same in the next process with the cache
that the first one filled: wall time, and CPU time of the process with its children, which other work on the machine
disturbs less. Both include tracing, the compiler's own imports and one run of the step, but not building the model,
moving it and starting the device. Where Python writes no bytecode (`PYTHONDONTWRITEBYTECODE`), half of the import time
is compiling source: unset the variable and set `PYTHONPYCACHEPREFIX` to a folder, so that the warm start finds
bytecode. `eager` (Dynamo alone) and `aot_eager` (Dynamo + AOTAutograd) are floors: the time of torch itself before the
backend is called. The last columns count graphs that Dynamo traced, kernels that were compiled, and steps (ours) or
graphs (Inductor's) that came whole from the compiler's cache. `--breakdown` samples the stacks of all systems and
prints the time of imports, Dynamo, AOTAutograd, the compiler and the step itself.
"""

from __future__ import annotations

import argparse
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
from sampled import PHASES, Sampled
from tabulate import tabulate

SYSTEMS = ("overlapc", "inductor", "aot_eager", "eager")


def main() -> None:
    args = arguments()
    if args.worker:
        print("RESULT " + json.dumps(measure(args.worker, args)))
        return
    systems = args.systems.split(",")
    seconds: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="compile_time") as folder:
            for phase in ("cold", "warm"):
                for system in systems:
                    found = run(system, phase, Path(folder) / system, args)
                    seconds.setdefault((system, phase), []).append(found)
                    # At once: if the run is cut off later, this much is known.
                    print(f"{system} {phase}: {found['first_s']:.2f} s, {found['phases']}", file=sys.stderr, flush=True)
    rows = []
    for system in systems:
        row: list[Any] = [system]
        for phase in ("cold", "warm"):
            row.append(statistics.median(each["cpu_s"] for each in seconds[system, phase]))
            row.append(statistics.median(each["first_s"] for each in seconds[system, phase]))
            if "inductor" in systems:
                theirs = statistics.median(each["first_s"] for each in seconds["inductor", phase])
                row.append(f"{row[-1] / theirs:.2f}")
        last = seconds[system, "warm"][-1]
        rows.append([*row, last["step_s"], last["traced"], last["compiles"], last["from_cache"], last["loss"]])
    ratio = ["/ inductor"] if "inductor" in systems else []
    on = seconds[systems[0], "warm"][-1]["on"]
    print(f"{args.device}, {args.model}, {args.layers} layers, sequence {args.seq}; {on}")
    headers = [
        "system",
        "cold cpu s",
        "cold s",
        *ratio,
        "warm cpu s",
        "warm s",
        *ratio,
        "step s",
        "traced warm",
        "compiles warm",
        "from cache warm",
        "loss",
    ]
    print(tabulate(rows, headers, floatfmt=".3f"))
    if args.breakdown:
        print_phases(seconds)


def print_phases(seconds: dict[tuple[str, str], list[dict[str, Any]]]) -> None:
    """Print the time of the last round by phase."""
    found = [(system, phase, runs[-1]) for (system, phase), runs in seconds.items()]
    rows = [[system, phase, *run["phases"].values(), run["first_s"]] for system, phase, run in found]
    print("\nseconds by phase\n" + tabulate(rows, ["system", "", *PHASES, "together"], floatfmt=".2f"))
    for system, phase, run in found:
        print(f"\n{system}, {phase}, most at once:")
        print(tabulate(run["details"].items(), floatfmt=".2f", tablefmt="plain"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--model", choices=("small", "8b"), default="small", help="width: 256, or Llama-8B's 4096")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1, help="pairs of cold and warm starts, each with new folders")
    parser.add_argument("--systems", default="overlapc,inductor", help=f"some of {', '.join(SYSTEMS)}")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds a process may take")
    parser.add_argument("--profile", type=Path, help="write cProfile files PROFILE.<system>.<phase>")
    parser.add_argument("--breakdown", action="store_true", help="sample stacks and print the time of each phase")
    parser.add_argument("--precompile", action="store_true", help="let torch cache guards and bytecode")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    return parser.parse_args()


def run(system: str, phase: str, cache: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Run one process of `system` with that system's cache folders; return its results."""
    given = {**environment_with_caches(cache), "TORCH_CACHING_PRECOMPILE": str(int(args.precompile))}
    command = [sys.executable, __file__, "--worker", system]
    for name in ("device", "model", "layers", "seq"):
        command += [f"--{name}", str(getattr(args, name))]
    command += [f"--{name}" for name in ("precompile", "breakdown") if getattr(args, name)]
    if args.profile:
        command += ["--profile", f"{args.profile}.{system}.{phase}"]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=args.timeout)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not found:
        raise SystemExit(f"{system} failed ({done.returncode}):\n{done.stdout}\n{done.stderr}")
    return json.loads(found[0].removeprefix("RESULT "))


def measure(system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the first step and a later one in this process."""
    import torch

    from overlapc.launch.llama import Llama, LlamaConfig

    shape = LlamaConfig.llama_8b(args.layers, args.seq)
    if args.model == "small":
        shape = LlamaConfig(256, args.layers, 4, 2, 768, 512, args.seq)
    torch.manual_seed(0)
    with torch.device(args.device):
        model = Llama(shape)
        tokens = torch.randint(0, shape.vocab, (1, args.seq))
    if args.device == "cuda":
        model.to(torch.bfloat16)
        (torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")).sum().item()
    torch.zeros(4, requires_grad=True).sum().backward()
    sampled = Sampled()

    def step() -> float:
        began = time.perf_counter()
        loss = compiled(tokens, tokens)
        loss.backward()
        step.loss = loss.item()  # type: ignore[attr-defined]
        if args.device == "cuda":
            torch.cuda.synchronize()
        model.zero_grad(set_to_none=True)
        return time.perf_counter() - began

    watched: contextlib.AbstractContextManager[Any] = sampled if args.breakdown else contextlib.nullcontext()
    if args.profile:
        watched = cProfile.Profile()
    began, cpu_began = time.perf_counter(), sum(os.times()[:4])
    with watched:
        compiled = torch.compile(model, backend=system, fullgraph=True)  # some backends are imported here
        step()
    first = time.perf_counter() - began
    cpu = sum(os.times()[:4]) - cpu_began
    if args.profile:
        watched.dump_stats(args.profile)  # type: ignore[attr-defined]
    usual = min(step() for _ in range(3))
    if args.precompile:
        torch.compiler.save_cache_artifacts()
    counters = torch._dynamo.utils.counters
    ours = counters["overlapc"]
    return {
        "first_s": first,
        "cpu_s": cpu,
        "step_s": usual,
        "loss": step.loss,  # type: ignore[attr-defined]
        "compiles": ours["kernel_compiles"] if system == "overlapc" else counters["inductor"]["fxgraph_cache_miss"],
        "from_cache": ours["steps_from_cache"] if system == "overlapc" else counters["inductor"]["fxgraph_cache_hit"],
        "traced": counters["stats"]["unique_graphs"],
        "phases": sampled.seconds() if args.breakdown else {},
        "details": sampled.details() if args.breakdown else {},
        "on": f"torch {torch.__version__}, {torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}",
    }


if __name__ == "__main__":
    main()
