"""Time lowering and fusion of whole Llamas, forward and backward, beside Inductor's lowering and scheduling.

    python benchmarks/fusion_speed.py [--layers 8,32,80] [--inductor 32] [--profile]

Both sides start from their own captured FX graphs (Inductor's after its graph passes, which are not timed) and stop
before code generation, in one process, one after another. Seconds are CPU time, which other processes disturb less;
`us/node` counts FX nodes that are calls.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import time
from collections.abc import Sequence
from typing import Any

from models import inductor_graphs, inductor_scheduled, llama, lowered, overlapc_graphs
from tabulate import tabulate
from torch.fx import GraphModule

from overlapc.fusion import fuse_ops


class Stopwatch:
    """Adds up the times of the graphs that it is given, and the number of calls in them."""

    def __init__(self, profile: bool = False) -> None:
        self.seconds: dict[str, float] = {}
        self.calls = 0
        self.profiler = cProfile.Profile() if profile else None

    def ours(self, gm: GraphModule, inputs: Sequence[Any], which: str) -> None:
        """Time our lowering and fusion of one graph."""
        self._count(gm)
        if self.profiler is not None:
            self.profiler.enable()
        began = time.process_time()
        graph = lowered(gm, which)
        between = time.process_time()
        fuse_ops(graph)
        ended = time.process_time()
        if self.profiler is not None:
            self.profiler.disable()
        self._add("lowering", between - began)
        self._add("fusion", ended - between)

    def inductors(self, gm: GraphModule, inputs: Sequence[Any], which: str) -> None:
        """Time Inductor's lowering and scheduling of one graph."""
        self._count(gm)
        began = time.process_time()
        inductor_scheduled(gm, inputs)
        self._add("lowering and scheduling", time.process_time() - began)

    def _count(self, gm: GraphModule) -> None:
        self.calls += sum(node.op == "call_function" for node in gm.graph.nodes)

    def _add(self, what: str, seconds: float) -> None:
        self.seconds[what] = self.seconds.get(what, 0.0) + seconds

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", default="8,32,80")
    parser.add_argument("--inductor", default="32", help="numbers of layers for which Inductor is timed, too")
    parser.add_argument("--profile", action="store_true", help="print a profile of overlapc")
    args = parser.parse_args()
    compared = {int(number) for number in args.inductor.split(",") if number}
    rows = []
    overlapc_graphs(llama(1), Stopwatch().ours)  # imports and first-use tables of both sides
    if compared:
        inductor_graphs(llama(1), Stopwatch().inductors)
    for layers in map(int, args.layers.split(",")):
        ours = Stopwatch(args.profile)
        overlapc_graphs(llama(layers), ours.ours)
        row = [layers, ours.calls, *ours.seconds.values(), ours.total, 1e6 * ours.total / ours.calls]
        if layers in compared:
            theirs = Stopwatch()
            inductor_graphs(llama(layers), theirs.inductors)
            row += [theirs.total, ours.total / theirs.total]
        rows.append(row)
        if ours.profiler is not None:
            pstats.Stats(ours.profiler).sort_stats("tottime").print_stats(30)
    headers = ["layers", "calls", "lowering s", "fusion s", "total s", "us/node", "Inductor's s", "ratio"]
    print(tabulate(rows, headers=headers, floatfmt=".2f"))


if __name__ == "__main__":
    main()
