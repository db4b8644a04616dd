"""Our passes beside Inductor's on the same schedules, judged by the same simulator with the same estimates.

    python benchmarks/overlap_against_inductor.py [FILE ...] [--profile h200-nvlink] [--full] [--orders FOLDER]

FILEs are schedules before any pass (default: the corpus in tests/schedules), estimated by the profile. Every order of
Inductor's (inductor_orders.py) is tried on the schedule as it is and on our buckets, which need no copies;
ours may then use as much memory as that order took, if this is more than the limit of our passes. The table has
the best of Inductor's orders by exposed time beside ours, `--full` all of them. Exposed time and step in ms, peaks in
GiB. An order that takes Inductor longer than `--limit` seconds of CPU time is left out and named. `--orders` keeps its
orders as text, and takes those that are there already: they take hours, ours seconds.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from inductor_orders import NoStandIn, orders  # beside this file
from tabulate import tabulate

from overlapc.config import Config
from overlapc.estimators.from_profile import from_profile
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.estimators.simulator.clock_under_load import settled
from overlapc.estimators.timeline import Timeline, simulate
from overlapc.passes.base import Context
from overlapc.passes.run import run_pipeline
from overlapc.passes.runner import run_passes, select
from overlapc.planning.pass_context import context_of
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify

BUCKETS = " on buckets"
CORPUS = Path(__file__).resolve().parents[1] / "tests" / "schedules"


@dataclass(frozen=True)
class Judged:
    """An order and what the simulator says of it."""

    name: str
    timeline: Timeline
    seconds: float

    @property
    def exposed_ms(self) -> float:
        """Of all collectives together."""
        return self.timeline.exposed_ns / 1e6

    @property
    def step_ms(self) -> float:
        """The whole replay."""
        return self.timeline.step_ns / 1e6

    @property
    def peak_bytes(self) -> int:
        """Live bytes at most."""
        return analyze(self.timeline.schedule).peak_bytes


def main() -> None:
    args = arguments()
    profile = load_profile(args.profile)
    chain = from_profile(profile)
    ctx = context_of(Config(verify=False), profile, chain)
    rows = []
    counts = {where: Counter[str]() for where in ("", BUCKETS)}
    for path in args.files or sorted(CORPUS.glob("*.sched")):
        schedule = parse(path.read_text())
        schedule = schedule.with_estimates({node.name: chain.estimate(node) for node in schedule.nodes})
        before = settled(simulate(schedule, profile)).exposed_ns / 1e6
        for where, given in given_to_inductor(schedule, ctx).items():
            found = inductors(given, ctx, where, args)
            theirs = sorted(found, key=lambda each: (each.exposed_ms, each.step_ms))
            for each in theirs if args.full else theirs[:1]:
                same = ours(schedule, replace(ctx, budget_bytes=max(each.peak_bytes, ctx.limit_bytes(schedule))))
                rows.append([path.stem, before, each.name, *numbers(each), *numbers(same)])
                if each is theirs[0]:
                    counts[where][compared(same.exposed_ms, each.exposed_ms)] += 1
        print(tabulate(rows[-1:], tablefmt="plain", floatfmt=".3f"), file=sys.stderr)
    columns = ("exposed", "step", "peak", "s")
    head = ["schedule", "before", "Inductor's order", *columns, *(f"{column} ours" for column in columns)]
    print(tabulate(rows, head, floatfmt=".3f"))
    for where, count in counts.items():
        print(f"our exposed time beside the best of Inductor's{where}: {dict(count)}")


def compared(ours_ms: float, theirs_ms: float) -> str:
    """In words, a thousandth apart being the same."""
    if abs(ours_ms - theirs_ms) <= 1e-3 * max(ours_ms, theirs_ms):
        return "the same"
    return "less" if ours_ms < theirs_ms else "more"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--profile", default="h200-nvlink", help="device profile (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=60, help="CPU seconds for one order of Inductor's (default: 60)")
    parser.add_argument("--orders", type=Path, help="folder that keeps Inductor's orders from run to run")
    parser.add_argument("--full", action="store_true", help="all of Inductor's orders, best first")
    return parser.parse_args()


def given_to_inductor(schedule: Schedule, ctx: Context) -> dict[str, Schedule]:
    """The schedule as it is, and with our buckets if there are any; at full load, as our passes see it."""
    bucketed, _ = run_passes(schedule, ctx, select(("bucket",)))
    return {"": schedule} if bucketed is schedule else {"": schedule, BUCKETS: bucketed}


def inductors(schedule: Schedule, ctx: Context, where: str, args: argparse.Namespace) -> Iterator[Judged]:
    """Every order of Inductor's that is found within `args.limit` seconds."""
    for name in orders():
        found = kept(schedule, name, args)
        if found.failed:
            print(f"{schedule.name}: {name}{where} left out, it {found.failed}", file=sys.stderr)
            continue
        moved = schedule.replace_order(found.nodes, reorder_collectives=True)
        verify(moved, name + where, reference=schedule, may_reorder_collectives=True)
        yield Judged(name + where, settled(simulate(moved, ctx.profile)), found.seconds)  # as ours is judged


@dataclass(frozen=True)
class Order:
    """What one of Inductor's passes made of a schedule: names of nodes, or why there are none."""

    nodes: tuple[str, ...]
    seconds: float  # of CPU time
    failed: str = ""


def kept(schedule: Schedule, name: str, args: argparse.Namespace) -> Order:
    """The order `name`, from `args.orders` if it is there; one that took too long is tried again with more time."""
    if args.orders is None:
        return order_of(schedule, name, args.limit)
    of_what = hashlib.sha256(f"{schedule}\n{name}".encode()).hexdigest()[:12]
    path: Path = args.orders / f"{schedule.name}_{name.replace(' ', '_')}_{of_what}.json"
    if path.exists():
        found = Order(**json.loads(path.read_text()))
        if not found.failed or found.seconds >= 0.9 * args.limit:
            return found
    found = order_of(schedule, name, args.limit)
    args.orders.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(found)))
    return found


def order_of(schedule: Schedule, name: str, limit_s: int) -> Order:
    """Runs Inductor's passes."""
    began = time.process_time()
    try:
        with within(limit_s):
            moved = orders()[name](schedule)
    except TimeoutError:
        return Order((), time.process_time() - began, f"takes more than {limit_s} s")
    except RecursionError:  # its overlap scheduling calls itself without bound
        return Order((), limit_s, "recurses too deep")
    except NoStandIn as why:
        return Order((), limit_s, str(why))
    return Order(tuple(node.name for node in moved.nodes), time.process_time() - began)


@contextmanager
def within(seconds: int) -> Iterator[None]:
    """TimeoutError when what is done inside takes more CPU time."""

    def ring(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def ours(schedule: Schedule, ctx: Context) -> Judged:
    """The default passes."""
    began = time.perf_counter()
    return Judged("default", run_pipeline(schedule, ctx).after, time.perf_counter() - began)


def numbers(each: Judged) -> list[float]:
    return [each.exposed_ms, each.step_ms, each.peak_bytes / 2**30, each.seconds]


if __name__ == "__main__":
    main()
