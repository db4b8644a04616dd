"""What pass pipelines make of schedule texts, if collectives take as long as estimated and if they take longer.

    python benchmarks/overlap_plans.py [FILE ...] [--profile h200-nvlink] [--times 1.0,1.5] [--pipelines A+B,C]

FILEs are schedules before any pass (default: the corpus in tests/schedules). A pipeline is names joined by `+`;
`default` and `none` are two. Exposed time, step and lower bound in ms, peak in GiB.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from tabulate import tabulate

from overlapc.config import Config
from overlapc.context import context_of
from overlapc.estimators.base import estimate_schedule
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.from_profile import from_profile
from overlapc.estimators.profile_file import load_profile
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import run_pipeline
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Estimate, Schedule
from overlapc.schedule.text import parse

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "schedules"
PIPELINES = "none,raise_under_memory+sink_waits,bucket,plan_overlap,default"


def main() -> None:
    args = arguments()
    profile = load_profile(args.profile)
    times = [float(part) for part in args.times.split(",")]
    rows = []
    for path in args.files or sorted(CORPUS.glob("*.sched")):
        for pipeline in args.pipelines.split(","):
            rows.append([path.name, pipeline, *measured(parse(path.read_text()), pipeline, profile, times)])
    head = ["schedule", "passes", "starts", "peak", "seconds"]
    head += [f"{what} x{each:g}" for each in times for what in ("step", "exposed", "bound")]
    print(tabulate(rows, head, floatfmt=".2f"))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--profile", default="h200-nvlink", help="device profile (default: %(default)s)")
    parser.add_argument("--times", default="1.0,1.5", help="factors on collective time (default: %(default)s)")
    parser.add_argument("--pipelines", default=PIPELINES, help="pipelines to compare (default: %(default)s)")
    return parser.parse_args()


def measured(schedule: Schedule, pipeline: str, profile: DeviceProfile, times: list[float]) -> list[float]:
    """Starts, peak, seconds in the passes, and step, exposed time and bound for each of `times`."""
    chain = from_profile(profile)
    passes = {"none": (), "default": None}.get(pipeline, tuple(pipeline.split("+")))
    ctx = context_of(Config(passes=passes), profile, chain)
    schedule = estimate_schedule(schedule, chain).schedule
    began = time.perf_counter()
    final = run_pipeline(schedule, ctx).schedule
    row = [len(final.starts()), analyze(final).peak_bytes / 2**30, time.perf_counter() - began]
    for factor in times:
        timeline = simulate(stretched(final, factor), profile)
        row += [timeline.step_ns / 1e6, timeline.exposed_ns / 1e6, timeline.lower_bound_ns / 1e6]
    return row


def stretched(schedule: Schedule, factor: float) -> Schedule:
    """Every collective takes `factor` times its estimate."""
    return schedule.with_estimates(
        {
            node.name: Estimate(node.estimate.ns * factor, node.estimate.source)
            for node in schedule.nodes
            if node.comm is not None and node.estimate is not None
        }
    )


if __name__ == "__main__":
    main()
