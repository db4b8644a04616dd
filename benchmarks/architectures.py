"""Cold compile times of small Hugging Face models of many architectures, ours beside Inductor's, in fresh processes.

    python benchmarks/architectures.py                                  # all models of tests/models, float32, CPU
    python benchmarks/architectures.py --jobs 8                         # eight models at a time
    python benchmarks/architectures.py --models bert,t5 --profile FILE  # cProfile: FILE.bert.overlapc, ...

Timed is the first forward and backward with empty cache folders: tracing, the compiler with its imports, the C++
compiler that both systems start, and one run of the step. `cpu s` is the CPU time of the process and its children,
which other work on the machine disturbs less than wall time. Building the model does not count. For each model the two
systems run one after the other. The last column compares both losses with eager's.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from caches import environment_with_caches
from tabulate import tabulate

SYSTEMS = ("overlapc", "inductor")


def main() -> None:
    args = arguments()
    if args.worker:
        print("RESULT " + json.dumps(measure(args.worker, args.models, args.profile)))
        return
    names = args.models.split(",") if args.models else models()
    with ThreadPoolExecutor(args.jobs) as pool:
        results = dict(zip(names, pool.map(partial(both, args=args), names), strict=True))
    show(results)


def both(model: str, args: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Measure `model` under each system; return the results by system."""
    by: dict[str, dict[str, Any]] = {}
    for system in SYSTEMS:
        by[system] = run(model, system, args)
        print(f"{model} {system}: {by[system]}", file=sys.stderr, flush=True)  # at once: a later run may be cut off
    return by


def show(results: dict[str, dict[str, dict[str, Any]]]) -> None:
    """Print a row for each model that both systems compiled, their sum, and the failures."""
    whole = {model: by for model, by in results.items() if not any("failed" in found for found in by.values())}
    rows = [row(model, [by]) for model, by in whole.items()]
    if whole:
        rows.append(row("sum", [*whole.values()]))
    print(tabulate(rows, ["model", *(f"{s} {unit}" for unit in ("cpu s", "s") for s in (*SYSTEMS, "ratio")), "losses"]))
    for model, by in results.items():
        for system, found in by.items():
            if "failed" in found:
                print(f"{model} {system}: {found['failed']}")


def row(name: str, added: Sequence[dict[str, dict[str, Any]]]) -> list[str]:
    """Return a table row: seconds of both systems, added up over these models, and their ratio."""
    cells = [name]
    for field in ("cpu_s", "first_s"):
        ours, theirs = (sum(by[system][field] for by in added) for system in SYSTEMS)
        cells += [f"{ours:.1f}", f"{theirs:.1f}", f"{ours / theirs:.2f}"]
    agree = all(abs(by[s]["loss"] - by[s]["eager"]) <= 1e-4 * abs(by[s]["eager"]) for by in added for s in SYSTEMS)
    return [*cells, "as eager" if agree else "DIFFER"]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="", help="names in tests/models/test_huggingface.py (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="models at a time (default: %(default)s)")
    parser.add_argument("--timeout", type=float, default=400.0, help="seconds a process may take")
    parser.add_argument("--profile", help="write cProfile files PROFILE.MODEL.SYSTEM")
    parser.add_argument("--worker", choices=SYSTEMS, help=argparse.SUPPRESS)
    return parser.parse_args()


def models() -> list[str]:
    """Return the names of all models."""
    from tests.models.test_huggingface import MODELS

    return list(MODELS)


def run(model: str, system: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run `model` under `system` in one process with empty caches; return its results."""
    with tempfile.TemporaryDirectory(prefix="architectures") as folder:
        command = [sys.executable, __file__, "--worker", system, "--models", model]
        command += ["--profile", f"{args.profile}.{model}.{system}"] if args.profile else []
        environment = environment_with_caches(Path(folder))
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.timeout)
        except subprocess.TimeoutExpired:
            return {"failed": f"took longer than {args.timeout:.0f} s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    result: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return result


def measure(system: str, name: str, profile: str | None) -> dict[str, Any]:
    """Measure the first step of a model in this process."""
    import torch

    from overlapc.report.captures import CAPTURES
    from tests.models.test_huggingface import MODELS, step

    torch.manual_seed(0)
    model, inputs = MODELS[name]()
    model.train()
    eager, _ = step(model, inputs, model)
    profiled = cProfile.Profile()
    began, cpu_began = time.perf_counter(), sum(os.times()[:4])
    if profile:
        profiled.enable()
    loss, _ = step(model, inputs, torch.compile(model, backend=system))
    profiled.disable()
    first_s, cpu_s = time.perf_counter() - began, sum(os.times()[:4]) - cpu_began
    if profile:
        profiled.dump_stats(profile)
    return {
        "first_s": first_s,
        "cpu_s": cpu_s,
        "loss": loss.item(),
        "eager": eager.item(),
        "graphs": torch._dynamo.utils.counters["stats"]["unique_graphs"],
        "phases": {phase: round(seconds, 2) for phase, seconds in CAPTURES.seconds().items()},
    }


if __name__ == "__main__":
    main()
