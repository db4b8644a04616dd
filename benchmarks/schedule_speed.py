"""Time operations on schedules: parsing, dependences, liveness, simulation, bound, default passes and local moves.

    python benchmarks/schedule_speed.py [NODES ...]      (default: 2000 20000; ms of CPU time, best of three)

The schedule is an FSDP-like step: layers of kernels, each after its gathers and their waits; then the layers in reverse
order, each also followed by reduce-scatters and their waits.

The default passes also run on a step whose collectives take three times as long, more than compute can hide.

A local move puts a start or a wait up to 16 places earlier or later; its cost is wall time of the incremental replay.
It is high where a queue has a backlog, because then everything that follows on this queue changes its time.
"""

from __future__ import annotations

import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from overlapc.config import Config
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.profiles.profile_file import load_profile
from overlapc.estimators.simulator.native import replay_of
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context
from overlapc.passes.run import Result, run_pipeline
from overlapc.schedule import dependencies
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Estimate, Kind, Schedule
from overlapc.schedule.text import parse

KERNELS = 8  # per layer and direction; with four gathers, two scatters and their waits this makes 30 nodes per layer


def fsdp_step(nodes: int, reduce_group: str = "dp") -> str:
    """Return a step of about `nodes` nodes as schedule text; scatters run on the queue of `reduce_group`."""
    layers = max(1, nodes // (2 * KERNELS + 14))
    lines = ["schedule fsdp", "h = input : 64MiB"]
    last = "h"

    def gathers(prefix: str, layer: int) -> None:
        for half in "xy":
            name = f"{prefix}{half}{layer}"
            lines.append(f"{name} = all_gather(p{half}{layer}) @dp(4) unit=l{layer} : 128MiB 350us")
            lines.append(f"w{name} = wait({name})")

    for layer in range(layers):
        lines += [f"p{half}{layer} = input : 32MiB" for half in "xy"]
        gathers("f", layer)
        for k in range(KERNELS):
            lines.append(f"f{layer}_{k} = extern({last}, wf{'xy'[k % 2]}{layer}) flops=1000 : 16MiB 150us")
            last = f"f{layer}_{k}"
    for layer in reversed(range(layers)):
        gathers("b", layer)
        for k in reversed(range(KERNELS)):
            lines.append(
                f"b{layer}_{k} = extern({last}, f{layer}_{k}, wb{'xy'[k % 2]}{layer}) flops=1000 : 16MiB 250us"
            )
            last = f"b{layer}_{k}"
        for half in "xy":
            lines.append(f"g{half}{layer} = extern({last}) flops=1000 : 256MiB 100us")
            lines.append(
                f"r{half}{layer} = reduce_scatter(g{half}{layer}) @{reduce_group}(4) unit=l{layer} : 64MiB 500us"
            )
            lines.append(f"s{half}{layer} = wait(r{half}{layer})")
    lines.append("return " + ", ".join(f"s{half}{layer}" for layer in range(layers) for half in "xy"))
    return "\n".join(lines)


def timed(what: str, call: Callable[[], Any], times: int = 3) -> Any:
    """Call `call` `times` times, print the best CPU time, and return the result."""
    best_ms = math.inf
    for _ in range(times):
        begin = time.process_time()
        result = call()
        best_ms = min(best_ms, (time.process_time() - begin) * 1e3)
    print(f"  {what:<28} {best_ms:9.1f} ms", flush=True)
    return result


def slow_network(schedule: Schedule) -> Schedule:
    """Return the same step with collectives that take three times as long."""
    return schedule.with_estimates(
        {node.name: Estimate(3 * node.estimate.ns, "given") for node in schedule.starts() if node.estimate is not None}
    )


def planned(schedule: Schedule, profile: DeviceProfile) -> Result:
    """Run the default passes on a copy of `schedule` without any cached analysis."""
    fresh = replace(schedule)
    return run_pipeline(
        fresh, Context(profile=profile, reorder_collectives=True, overlap_margin=1.5, cache_dir=Config().cache_dir)
    )


def local_moves(schedule: Schedule, profile: DeviceProfile, count: int = 500) -> None:
    """Print the time to evaluate `count` random legal moves; every other one is then made."""
    rng = random.Random(0)
    deps = dependencies.of(schedule)
    replay = replay_of(schedule, profile, Config().cache_dir)
    movable = [at for at, node in enumerate(schedule.nodes) if node.kind in (Kind.START, Kind.WAIT)]
    tried_ms: list[float] = []
    changing_ms: list[float] = []  # of moves that change the time of some node
    while len(tried_ms) < count:
        node = rng.choice(movable)
        low = to = replay.order.index(node)
        step, blocked_by = rng.choice(((-1, deps.preds[node]), (1, deps.succs[node])))
        for _ in range(rng.randint(1, 16)):
            if not 0 <= to + step < len(replay.order) or replay.order[to + step] in blocked_by:
                break
            to += step
        if to == low:
            continue
        begin = time.perf_counter()
        timing = replay.try_move(low, low + 1, to)
        tried_ms.append((time.perf_counter() - begin) * 1e3)
        if timing != replay.timing:
            changing_ms.append(tried_ms[-1])
        if len(tried_ms) % 2:
            replay.move(low, low + 1, to)
    for what, ms in (("all", tried_ms), ("that change a time", changing_ms)):
        if ms:
            ms.sort()
            print(
                f"  local moves {what}: {len(ms)}, median {ms[len(ms) // 2]:.3f} ms,"
                f" 95% within {ms[len(ms) * 95 // 100]:.3f}, most {ms[-1]:.3f}"
            )


def main(sizes: list[int]) -> None:
    """Time every stage for schedules of each size."""
    profile = load_profile("h200-nvlink")
    for size in sizes:
        text = fsdp_step(size)
        schedule: Schedule = timed("parse", lambda text=text: parse(text))
        print(f"{len(schedule.nodes)} nodes")
        timed("print", lambda schedule=schedule: str(schedule))
        timed("dependences", lambda schedule=schedule: dependencies.of(replace(schedule)))
        timed("liveness", lambda schedule=schedule: analyze(replace(schedule)))
        before = timed("simulate", lambda schedule=schedule: simulate(schedule, profile))
        timed("lower bound", lambda before=before: replace(before).lower_bound_ns)
        for what, step in (("default passes", schedule), ("default passes, slow network", slow_network(schedule))):
            result = timed(what, lambda step=step: planned(step, profile))
            before, after = result.before, result.after
            print(
                f"    step {before.step_ns / 1e6:.1f} -> {after.step_ns / 1e6:.1f} ms,"
                f" bound {after.lower_bound_ns / 1e6:.1f};"
                f" exposed {before.exposed_ns / 1e6:.1f} -> {after.exposed_ns / 1e6:.1f};"
                f" peak {analyze(schedule).peak_bytes / 2**30:.1f} ->"
                f" {analyze(result.schedule).peak_bytes / 2**30:.1f} GiB"
            )
            local_moves(result.schedule, profile)


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [2000, 20000])
