"""Measure the host time of one compiled forward + backward: RMSNorm, too small for its kernels to matter.

    python benchmarks/host_time.py --device cuda                      # microseconds per call, by system
    python benchmarks/host_time.py --device cpu --profile overlapc    # functions sorted by their own time
    python benchmarks/host_time.py --device cpu --problem 'TP x FSDP' --systems overlapc,inductor

Systems alternate; the table has medians and minima. On a GPU, no sample waits for the stream. Sharded models are those
of sharded_subject.py, which says what `overlapc-wrapped` and `overlapc-trusting` are.
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
from benchmarks.sharded_subject import SHARDINGS, ShardedSubject

SYSTEMS = ("overlapc", "inductor", "aot_eager", "eager")
CALLS = 50  # per sample
MODEL_CALLS = 10  # per sample of a sharded model


def sample(call: Callable[[], object], device: str, calls: int = CALLS) -> float:
    """Return the host time per call in microseconds; on a CPU, the CPU time of the only thread that works."""
    clock = time.thread_time
    if device == "cuda":  # two threads take turns, and the time they wait for each other counts
        torch.cuda.synchronize()
        clock = time.perf_counter
    began = clock()
    for _ in range(calls):
        call()
    return (clock() - began) / calls * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--problem", default="RMSNorm", choices=sorted({*PROBLEMS, *SHARDINGS}))
    parser.add_argument("--systems", default=",".join(SYSTEMS), type=lambda text: text.split(","))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--profile", metavar="SYSTEM", help="profile this system's call: functions by their own time")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    name, device = arguments.problem, arguments.device
    sharded = name in SHARDINGS
    calls = MODEL_CALLS if sharded else CALLS
    subjects: dict[str, Subject | ShardedSubject] = {}
    for system in arguments.systems:
        if sharded:
            subjects[system] = ShardedSubject(name, system, device)
        else:
            subjects[system] = Subject(PROBLEMS[name](Inputs(SCALES["tiny"], device)), system, name)
    kinds = ("both", "forward") if sharded else ("both", "forward", "backward")
    times: dict[tuple[str, str], list[float]] = {}
    for turn in range(arguments.rounds + 1):
        for system, subject in subjects.items():
            for kind in kinds:
                time_us = sample(getattr(subject, kind), device, calls)
                if turn:  # the first round compiles and warms up
                    times.setdefault((system, kind), []).append(time_us)
    rows = [
        [system, *(of(times[system, kind]) for kind in kinds for of in (statistics.median, min))] for system in subjects
    ]
    headers = [text for kind in kinds for text in (f"{kind} us".replace("both", "forward + backward"), "least")]
    print(tabulate(rows, headers=["system", *headers], floatfmt=".1f"))
    print(dict(counters["overlapc"]))
    if arguments.profile:
        recorded = cProfile.Profile()
        recorded.enable()
        for _ in range(20):
            sample(subjects[arguments.profile].both, device, calls)
        recorded.disable()
        pstats.Stats(recorded).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
