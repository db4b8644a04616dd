"""Our passes beside Inductor's on the same schedules, judged by the same simulator with the same estimates.

    python benchmarks/overlap_against_inductor.py [FILE ...] [--profile h200-nvlink] [--full] [--orders FOLDER]

FILEs are schedules before any pass (default: the corpus in tests/schedules), estimated by the profile. Every order of
Inductor's (inductor_orders.py) is tried on the schedule as it is and on our buckets, which need no copies; ours may
then use as much memory as that order, if this is more than our passes' limit. The table has the best of Inductor's
orders by exposed time beside ours; with `--full`, all of them. Exposed time and step are in ms, peaks in GiB. An order
that takes Inductor longer than `--limit` seconds of CPU time is left out and named. `--orders` caches Inductor's orders
in a folder, because they take hours (ours take seconds).
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
    """An order with the simulator's verdict, and the seconds it took to find."""

    name: str
    timeline: Timeline
    seconds: float

    @property
    def exposed_ms(self) -> float:
        """Exposed time of all collectives together."""
        return self.timeline.exposed_ns / 1e6

    @property
    def step_ms(self) -> float:
        """Time of the whole step."""
        return self.timeline.step_ns / 1e6

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes."""
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
    """Return whether ours is "less", "more" or "the same", within a thousandth."""
    if abs(ours_ms - theirs_ms) <= 1e-3 * max(ours_ms, theirs_ms):
        return "the same"
    return "less" if ours_ms < theirs_ms else "more"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE")
    parser.add_argument("--profile", default="h200-nvlink", help="device profile (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=60, help="CPU seconds for one order of Inductor's (default: 60)")
    parser.add_argument("--orders", type=Path, help="folder that caches Inductor's orders")
    parser.add_argument("--full", action="store_true", help="all of Inductor's orders, best first")
    return parser.parse_args()


def given_to_inductor(schedule: Schedule, ctx: Context) -> dict[str, Schedule]:
    """Return the schedule as it is and, if our passes bucket anything, the schedule with our buckets."""
    bucketed, _ = run_passes(schedule, ctx, select(("bucket",)))
    return {"": schedule} if bucketed is schedule else {"": schedule, BUCKETS: bucketed}


def inductors(schedule: Schedule, ctx: Context, where: str, args: argparse.Namespace) -> Iterator[Judged]:
    """Yield every order of Inductor's that is found within `args.limit` seconds."""
    for name in orders():
        found = kept(schedule, name, args)
        if found.failed:
            print(f"{schedule.name}: {name}{where} left out, it {found.failed}", file=sys.stderr)
            continue
        moved = schedule.replace_order(found.nodes, reorder_collectives=True)
        verify(moved, name + where, reference=schedule, may_reorder_collectives=True)
        yield Judged(name + where, settled(simulate(moved, ctx.profile)), found.seconds)  # judged as ours is


@dataclass(frozen=True)
class Order:
    """The order that one of Inductor's passes gave a schedule: names of nodes, or why there is none."""

    nodes: tuple[str, ...]
    seconds: float  # of CPU time
    failed: str = ""


def kept(schedule: Schedule, name: str, args: argparse.Namespace) -> Order:
    """Return the order `name`, cached in `args.orders`; one that took too long is retried if `--limit` has grown."""
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
    """Run Inductor's passes `name` on `schedule`."""
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
    """Raise TimeoutError when the block takes more than `seconds` of CPU time."""

    def ring(*_: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def ours(schedule: Schedule, ctx: Context) -> Judged:
    """Run our default passes on `schedule`."""
    began = time.perf_counter()
    return Judged("default", run_pipeline(schedule, ctx).after, time.perf_counter() - began)


def numbers(each: Judged) -> list[float]:
    return [each.exposed_ms, each.step_ms, each.peak_bytes / 2**30, each.seconds]


if __name__ == "__main__":
    main()
