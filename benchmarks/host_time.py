"""What one compiled forward + backward costs the host, and where: RMSNorm, too small for its kernels to matter.

    python benchmarks/host_time.py --device cuda                      # microseconds a call, by system
    python benchmarks/host_time.py --device cpu --profile overlapc    # functions by their own time

Systems alternate; medians. On a GPU the stream is not waited for within a sample.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tabulate import tabulate
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_cases import PROBLEMS, SCALES, Inputs
from benchmarks.kernel_subject import Subject

SYSTEMS = ("overlapc", "inductor", "aot_eager", "eager")
CALLS = 50  # a sample


def sample(call: Callable[[], object], device: str) -> float:
    """Microseconds of host time a call; on a CPU the CPU time of the one thread that does it all."""
    clock = time.thread_time
    if device == "cuda":  # two threads take turns, and waiting for each other counts
        torch.cuda.synchronize()
        clock = time.perf_counter
    began = clock()
    for _ in range(CALLS):
        call()
    return (clock() - began) / CALLS * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--problem", default="RMSNorm", choices=sorted(PROBLEMS))
    parser.add_argument("--systems", default=",".join(SYSTEMS), type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", metavar="SYSTEM", help="functions of this system's call by their own time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    problem = PROBLEMS[arguments.problem](Inputs(SCALES["tiny"], arguments.device))
    rows = []
    subjects = {system: Subject(problem, system, arguments.problem) for system in arguments.systems}
    for subject in subjects.values():
        for call in (subject.both, subject.forward, subject.backward):  # compiles, and warms up
            sample(call, arguments.device)
    times: dict[tuple[str, str], list[float]] = {}
    for _ in range(arguments.rounds):
        for system, subject in subjects.items():
            for name in ("both", "forward", "backward"):
                times.setdefault((system, name), []).append(sample(getattr(subject, name), arguments.device))
    for system in subjects:
        rows.append([system, *(statistics.median(times[system, name]) for name in ("both", "forward", "backward"))])
    print(tabulate(rows, headers=["system", "forward + backward us", "forward", "backward"], floatfmt=".1f"))
    print(dict(counters["overlapc"]))
    if arguments.profile:
        recorded = cProfile.Profile()
        recorded.enable()
        for _ in range(20):
            sample(subjects[arguments.profile].both, arguments.device)
        recorded.disable()
        pstats.Stats(recorded).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
