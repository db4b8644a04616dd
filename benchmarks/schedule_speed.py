"""How fast schedules are: parse, dependences, liveness, simulation, bound and the default passes.

    python benchmarks/schedule_speed.py [NODES ...]      (default: 2000 20000; ms of CPU time)

The schedule is an FSDP-like step: layers of kernels with a gather and its wait in front, then the same
backwards with a reduce-scatter and its wait behind.

Times are CPU time of this process. On 2 shared cores of an AMD EPYC: default passes 174 ms for 1,980 nodes and 2,139 ms
for 19,980, 12.3 times as long for ten times as many; 10.9 times with Python's garbage collector off.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from overlapc.estimators.device import load_profile
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context, run_pipeline
from overlapc.schedule import dependencies
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse

KERNELS = 8  # a layer and direction; with four gathers, two scatters and their waits this makes 30 nodes a layer


def fsdp_step(nodes: int, reduce_group: str = "dp") -> str:
    """A step of about `nodes` nodes as text; scatters run on the queue of `reduce_group`."""
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


def timed(what: str, call: Callable[[], Any]) -> Any:
    """The result of `call`; prints how long it took."""
    begin = time.process_time()
    result = call()
    print(f"  {what:<24} {(time.process_time() - begin) * 1e3:9.1f} ms", flush=True)
    return result


def main(sizes: list[int]) -> None:
    """Time every stage for schedules of each size."""
    profile = load_profile("h200-nvlink")
    for size in sizes:
        text = fsdp_step(size)
        schedule: Schedule = timed("parse", lambda text=text: parse(text))
        print(f"{len(schedule.nodes)} nodes")
        timed("print", lambda schedule=schedule: str(schedule))
        timed("dependences", lambda schedule=schedule: dependencies.of(schedule))
        timed("liveness", lambda schedule=schedule: analyze(schedule))
        before = timed("simulate", lambda schedule=schedule: simulate(schedule, profile))
        timed("lower bound", lambda before=before: before.lower_bound_ns)
        result = timed(
            "default passes",
            lambda schedule=schedule: run_pipeline(
                schedule, Context(profile=profile, reorder_collectives=True, overlap_margin=1.5)
            ),
        )
        print(
            f"  step {before.step_ns / 1e6:.1f} -> {result.after.step_ns / 1e6:.1f} ms,"
            f" bound {result.after.lower_bound_ns / 1e6:.1f};"
            f" exposed {before.exposed_ns / 1e6:.1f} -> {result.after.exposed_ns / 1e6:.1f};"
            f" peak {analyze(schedule).peak_bytes / 2**30:.1f} ->"
            f" {analyze(result.schedule).peak_bytes / 2**30:.1f} GiB"
        )


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]] or [2000, 20000])
