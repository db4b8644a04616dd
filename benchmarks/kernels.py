"""Time generated kernels that occur in training: overlapc beside Inductor and eager, in one alternating run.

    python benchmarks/kernels.py --prepare 12 --json kernels.json           # one GPU, about four minutes
    python benchmarks/kernels.py --device cpu --size small                  # this machine's cores
    python benchmarks/kernels.py --cases 'softmax|cross' --systems overlapc,inductor --profile --json slow.json
    python benchmarks/kernels.py --device cpu --size tiny --host-only --threads 1   # host time of calls
    python benchmarks/kernels.py --autotune --cases 'Norm|RoPE'             # and with measured block sizes
    python benchmarks/kernels.py --systems overlapc,overlapc-fast,eager     # and with numerics="fast"

The list is kernel_cases.py, held_out_kernels.py (`--list-of held-out`), kernels_of_other_fields.py (`--list-of
other-fields`) or reduction_kernels.py (`--list-of reductions`). On a GPU a case is timed twice: with
launches hidden (calls queued behind a held stream, device time between two events) and with launches (until the device
is idle again). `share` is the least bytes that the case must move over the hidden time, relative to a device copy of
1 GiB in the same run. `host` is the host time of one forward + backward call through autograd, with the device held.
On a CPU there is one time, that of the call; with one thread it is CPU time.

Every result is compared with a float64 run: its error may be at most twice eager's.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import overlapc
from benchmarks.held_out_kernels import HELD_OUT
from benchmarks.kernel_cases import BACKWARD, BOTH, FORWARD, PROBLEMS, RARE, SCALES, Inputs, Problem
from benchmarks.kernel_report import NOT_CHECKED, Result, summary, table
from benchmarks.kernel_subject import TUNED, Subject, checked, float64_results
from benchmarks.kernel_timing import Times, copy_bandwidth, on_cpu, on_gpu, profiled
from benchmarks.kernels_of_other_fields import OTHER_FIELDS
from benchmarks.reduction_kernels import REDUCTIONS
from overlapc.errors import OverlapcError
from overlapc.report import record as reports

SYSTEMS = ("overlapc", "inductor", "eager")
LISTS = {
    "training": PROBLEMS,
    "rare": RARE,
    "held-out": HELD_OUT,
    "other-fields": OTHER_FIELDS,
    "reductions": REDUCTIONS,
}


def least_bytes(problem: Problem, kind: str, outputs: Sequence[Tensor], gradients: Sequence[Tensor]) -> int:
    """Return the bytes of every input and output once, unless the problem declares fewer."""
    if kind in problem.least:
        return problem.least[kind]
    inputs = sum(tensor.nbytes for tensor in problem.tensors())
    written = sum(tensor.nbytes for tensor in outputs)
    found = sum(tensor.nbytes for tensor in gradients)
    backward = inputs + written + found  # reads the inputs, or saved tensors as large, and the outputs' gradients
    return {FORWARD: inputs + written, BACKWARD: backward, BOTH: inputs + written + backward}[kind]


def measured(name: str, make: Callable[[Inputs], Problem], arguments: argparse.Namespace) -> list[Result]:
    torch.manual_seed(0)
    reports.clear()
    problem = make(Inputs(SCALES[arguments.size], arguments.device))
    kinds = problem.kinds
    if arguments.host_only:
        kinds = (BOTH,) if problem.gradients else ()
    if not kinds:
        return []
    subjects, failed = {}, []
    eager = Subject(problem, "eager", name)
    reference = float64_results(problem, name) if arguments.check else []
    for system in arguments.systems:
        subject = eager if system == "eager" else Subject(problem, system, name)
        try:
            if system != "eager" and arguments.check:
                verdict = checked(problem, subject, Subject(problem, "eager", name), reference)
                if verdict != "ok":
                    failed.append(f"{system}: {verdict}")
            for kind in kinds:
                subject.call(kind)()
        except (RuntimeError, OverlapcError, NotImplementedError) as error:
            failed.append(f"{system}: {type(error).__name__}: {str(error).strip().splitlines()[0][:80]}")
            continue
        subjects[system] = subject
    del reference
    if arguments.compile_only:
        return []
    outputs = [leaf for leaf in pytree.tree_leaves(eager.forward()) if isinstance(leaf, Tensor)]
    gradients = eager.both() if problem.gradients else ()
    clock = on_cpu if arguments.device == "cpu" else on_gpu
    samples: dict[str, list[float]] = {}
    both: dict[str, Times] = {}
    if problem.gradients:
        both = clock({system: subject.both for system, subject in subjects.items()}, arguments.rounds)
        samples = {system: each.host or each.launched for system, each in both.items()}
    host = {system: 1e6 * statistics.median(each) for system, each in samples.items()}
    least = {system: 1e6 * min(each) for system, each in samples.items()}
    compiled = (graph for step in reports.report_of_process().steps for graph in step.graphs)
    tuned = [f"{graph.name}: {graph.tuned}" for graph in compiled if graph.tuned]
    results = []
    for kind in kinds:
        calls = {system: subject.call(kind) for system, subject in subjects.items()}
        times = both if arguments.host_only else clock(calls, arguments.rounds)
        waits = [f"{system} waits for the device" for system, each in times.items() if each.waits]
        results.append(
            Result(
                f"{name} {kind}" if problem.gradients else name,
                "; ".join([*failed, *waits]) or ("ok" if arguments.check else NOT_CHECKED),
                least_bytes(problem, kind, outputs, gradients),
                problem.matmul_bound,
                {system: 1e6 * statistics.median(each.hidden) for system, each in times.items()},
                {system: 1e6 * statistics.median(each.launched) for system, each in times.items()},
                host,
                least,
                {system: profiled(call) for system, call in calls.items()} if arguments.profile else {},
                tuned,
            )
        )
    return results


def prepare(arguments: argparse.Namespace) -> None:
    """Fill both systems' caches in parallel: run this script, compiling only, on shards of the list."""
    passed = ["--device", arguments.device, "--size", arguments.size, "--cases", arguments.cases]
    systems = [system for system in arguments.systems if system != TUNED]  # tuning needs the device to itself
    passed += ["--systems", ",".join(systems), "--no-check", "--compile-only"]
    passed += ["--host-only"] if arguments.host_only else []
    passed += ["--list-of", arguments.list_of]
    passed += ["--threads", str(torch.get_num_threads())]  # Inductor writes this number into its code and caches it
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, __file__, *passed, "--shard", f"{at}/{arguments.prepare}"],
            env=environment,
            stdout=subprocess.DEVNULL,
        )
        for at in range(arguments.prepare)
    ]
    for process in running:
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--size", choices=tuple(SCALES), help="default: gpu on cuda, small on cpu")
    parser.add_argument("--cases", default="", help="only problems whose name matches this expression")
    parser.add_argument("--list-of", default="training", choices=tuple(LISTS), help="problems (default: %(default)s)")
    parser.add_argument("--systems", default=",".join(SYSTEMS), type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds, systems alternating (default: 7)")
    parser.add_argument("--threads", type=int, help="CPU threads (default: torch's)")
    parser.add_argument("--shard", default="0/1", help="I/N: every Nth problem, from the Ith")
    parser.add_argument("--prepare", type=int, default=0, help="fill the caches with this many processes first")
    parser.add_argument("--compile-only", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-check", dest="check", action="store_false", help="do not compare with float64")
    parser.add_argument("--host-only", action="store_true", help="only host time of forward + backward calls")
    parser.add_argument("--autotune", action="store_true", help="also with measured block sizes (overlapc-tuned)")
    parser.add_argument("--profile", action="store_true", help="write device kernels of every case to --json")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no problem after this time")
    parser.add_argument("--json", type=Path, help="file to write all results to")
    parser.add_argument("--list", action="store_true", help="print the cases and stop")
    arguments = parser.parse_args()
    if arguments.autotune:
        arguments.systems.insert(1, TUNED)
    arguments.size = arguments.size or ("gpu" if arguments.device == "cuda" else "small")
    began = time.perf_counter()
    first, count = map(int, arguments.shard.split("/"))
    problems = LISTS[arguments.list_of]
    names = [name for name in problems if re.search(arguments.cases, name)][first::count]
    if arguments.list:
        for name in names:
            made = problems[name](Inputs(SCALES["tiny"], "cpu"))
            print("\n".join(f"{name} {kind}" if made.gradients else name for kind in made.kinds))
        return
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.prepare:
        prepare(arguments)
        print(f"caches filled in {time.perf_counter() - began:.0f} s", flush=True)
    bandwidth = copy_bandwidth() if arguments.device == "cuda" and not arguments.compile_only else None
    results: list[Result] = []
    for name in names:
        print(f"{time.perf_counter() - began:5.0f} s  {name}", file=sys.stderr, flush=True)
        if time.perf_counter() - began > arguments.seconds:
            print(f"time is up: not run from {name} on", flush=True)
            break
        results += measured(name, problems[name], arguments)
        if arguments.json:  # after every problem: a run may be cut short
            record = {"bandwidth": bandwidth, "results": [asdict(result) for result in results]}
            arguments.json.write_text(json.dumps(record, indent=1))
        torch._dynamo.reset()
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
    if arguments.compile_only:
        return
    where = torch.cuda.get_device_name() if arguments.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"{where}, torch {torch.__version__}, overlapc {overlapc.__version__}, {time.perf_counter() - began:.0f} s")
    if bandwidth is not None:
        print(f"device copy {bandwidth / 1e12:.2f} TB/s")
    print(table(results, bandwidth))
    print(summary(results, bandwidth))


if __name__ == "__main__":
    main()
