"""Measure the default passes' plans: step, peak, limit, planning time, and the gain of a longer search.

    python benchmarks/plan_quality.py [FILE ...] [--profile h200-nvlink] [--times 30]

FILEs are schedules before any pass (default: the corpus in tests/schedules), estimated by the profile. The longer
search runs `refine` again from the plan, with `--times` times its usual effort, another random seed and the same memory
limit. Steps are in ms, peaks in GiB, `s` is CPU time, and `missed %` is how much longer the planned step is than that
of the longer search. The last line has the sums of all steps.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from pathlib import Path

from tabulate import tabulate

from overlapc.config import Config
from overlapc.estimators.from_profile import from_profile
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.estimators.simulator.clock_under_load import settled
from overlapc.passes.base import Context
from overlapc.passes.refine import Search
from overlapc.passes.run import run_pipeline
from overlapc.planning.pass_context import context_of
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse

CORPUS = Path(__file__).resolve().parents[1] / "tests" / "schedules"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--profile", default="h200-nvlink", help="device profile (default: %(default)s)")
    parser.add_argument(
        "--times", type=int, default=30, help="the usual effort times this (default: %(default)s; 0: no longer search)"
    )
    args = parser.parse_args()
    profile = load_profile(args.profile)
    chain = from_profile(profile)
    ctx = context_of(Config(verify=False), profile, chain)
    rows = []
    for path in args.files or sorted(CORPUS.glob("*.sched")):
        schedule = parse(path.read_text())
        schedule = schedule.with_estimates({node.name: chain.estimate(node) for node in schedule.nodes})
        began = time.process_time()
        result = run_pipeline(schedule, ctx)
        seconds = time.process_time() - began
        limit = ctx.limit_bytes(schedule)
        peak = analyze(result.schedule).peak_bytes
        assert peak <= limit, f"{path.stem}: {peak} B exceed {limit} B"
        step_ms = result.after.step_ns / 1e6
        longer_ms = searched(result.ordered, replace(ctx, budget_bytes=limit), args.times) / 1e6
        rows.append(
            [
                path.stem,
                len(schedule.nodes),
                result.before.step_ns / 1e6,
                step_ms,
                result.after.exposed_ns / 1e6,
                result.after.lower_bound_ns / 1e6,
                peak / 2**30,
                limit / 2**30,
                seconds,
                longer_ms,
                100 * (step_ms / longer_ms - 1),
            ]
        )
        print(tabulate(rows[-1:], tablefmt="plain", floatfmt=".3f"), flush=True)
    head = [
        "schedule",
        "nodes",
        "before",
        "step",
        "exposed",
        "bound",
        "peak",
        "limit",
        "s",
        "longer search",
        "missed %",
    ]
    print(tabulate(rows, head, floatfmt=".3f"))
    print(f"sum of steps: {sum(row[3] for row in rows):.3f} ms, longer search {sum(row[9] for row in rows):.3f} ms")


def searched(schedule: Schedule, ctx: Context, times: int) -> float:
    """Return the step time in ns after a search from `schedule` with `times` times the usual effort."""
    search = Search(schedule, ctx, seed=0)
    search.replays_in_round *= max(1, times)
    search.run(times * ctx.effort)
    found = search.best or [node.name for node in schedule.nodes]
    moved = schedule.replace_order(found, reorder_collectives=ctx.reorder_collectives)
    return settled(ctx.timeline(moved)).step_ns


if __name__ == "__main__":
    main()
