"""Time generated kernels of all lists of kernels.py in other tilings than the heuristics choose.

    python benchmarks/triton_tilings.py --cases 'Norm|cross-entropy 32k' --seconds 120

Every kernel of a case is timed by itself, with launches hidden, for a few block sizes, numbers of warps and
programs, and pipeline depths around the choice of codegen/triton/tiling.py (`*`). The percentage is the rate of the
bytes that the kernel must move, relative to a device copy.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch.fx import GraphModule

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.kernel_cases import SCALES, Inputs, Problem
from benchmarks.kernels import LISTS
from benchmarks.models import decompositions, lowered, partition
from overlapc.codegen.generators import KernelSource
from overlapc.codegen.triton import TritonGenerator
from overlapc.codegen.triton import tiling as tilings
from overlapc.codegen.triton.candidates import alternatives
from overlapc.codegen.triton.tiling import Tiling
from overlapc.errors import OverlapcError
from overlapc.fusion import fuse_ops
from overlapc.fusion.work import work_of
from overlapc.fx.comm.canonical import canonicalize
from overlapc.fx.random import draw_once
from overlapc.ir.body import Body
from overlapc.ir.ops import Loops, LoweredGraph

CALLS = 10


@dataclass(frozen=True)
class Kernel:
    """One generated kernel of a case, and the graph that its buffers belong to."""

    name: str
    op: Loops
    graph: LoweredGraph

    def memory(self) -> dict[str, Tensor]:
        """Return memory for every buffer: random in float32 and bfloat16; else zeros, as it may hold indices."""
        found = {}
        for name in dict.fromkeys(item.buffer for item in tilings.accesses_of(self.op.body)):
            layout = self.graph.views[name].layout
            size = self.graph.hint(layout.storage_numel())
            made = torch.zeros(size, dtype=layout.dtype, device="cuda")
            found[name] = made.normal_() if layout.dtype in (torch.float32, torch.bfloat16) else made
        return found


def kernels_of(problem: Problem, name: str) -> list[Kernel]:
    """Return the kernels that overlapc generates for a problem, forward and backward, except scatters (they mutate)."""
    found: list[Kernel] = []

    def compiler(gm: GraphModule, inputs: Sequence[Any], which: str) -> Any:
        canonicalize(gm)
        draw_once(gm.graph)
        graph = lowered(gm, which)
        for op in fuse_ops(graph)[0]:
            if isinstance(op, Loops) and not op.mutates:
                found.append(Kernel(f"{name}, {which} {op.name}", op, graph))
        return make_boxed_func(gm.forward)

    compilers = {"fw_compiler": partial(compiler, which="forward"), "bw_compiler": partial(compiler, which="backward")}
    backend = aot_autograd(**compilers, decompositions=decompositions(), partition_fn=partition)
    torch._dynamo.reset()
    for at in problem.gradients:
        problem.inputs[at].requires_grad_()
    result = torch.compile(problem.function, backend=backend, dynamic=False)(*problem.inputs)
    outputs = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if leaf.requires_grad]
    if outputs:
        torch.autograd.backward(outputs, [torch.ones_like(leaf) for leaf in outputs])
    return found


def variants(body: Body, chosen: Tiling) -> Iterator[tuple[str, Tiling]]:
    """Yield (label, tiling): the choice and its neighbours."""
    yield "*", chosen
    if chosen.form == "tiled":
        for each in alternatives(body, {}, chosen)[1:]:
            yield f"{each.zblock} x {each.yblock} x {each.xblock}, warps {each.num_warps}", each
        return
    warps = [each for each in (chosen.num_warps // 2, chosen.num_warps * 2) if 1 <= each <= 32]
    wider = [each for each in (chosen.xblock // 2, chosen.xblock * 2) if each >= 1]
    if chosen.form in ("totals", "looped", "split"):
        for stages in (0, 2, 3, 4):
            yield f"stages {stages}", replace(chosen, num_stages=stages)
    for each in warps:
        yield f"warps {each}", replace(chosen, num_warps=each)
    if chosen.form == "totals":
        for factor in (0.5, 0.75, 1.5, 2):
            splits = int(chosen.splits * factor)
            yield f"splits {splits}", chosen.with_splits(splits)
            for each in warps:
                yield f"splits {splits}, warps {each}", replace(chosen, splits=splits, num_warps=each)
    if chosen.form == "split":
        for factor in (0.5, 2, 4):
            yield f"splits {int(chosen.splits * factor)}", chosen.with_splits(max(2, int(chosen.splits * factor)))
        for rblock in (64, 128):
            for each in (4, 8):
                whole = replace(chosen, form="looped", splits=1, rblock=rblock, num_warps=each, num_stages=3)
                yield f"not split, r {rblock}, warps {each}, stages 3", whole
    if chosen.form in ("looped", "split"):
        for rblock in (chosen.rblock // 2, chosen.rblock * 2, chosen.rblock * 4):
            yield f"r {rblock}", replace(chosen, rblock=rblock)
            for each in warps:
                yield f"r {rblock}, warps {each}", replace(chosen, rblock=rblock, num_warps=each)
    if chosen.form in ("persistent", "split", "flat", "rows", "totals"):
        for xblock in wider:
            yield f"x {xblock}", replace(chosen, xblock=xblock)
            if chosen.form == "split":
                yield (
                    f"x {xblock}, square",
                    replace(chosen, xblock=xblock, rblock=chosen.rblock * chosen.xblock // xblock),
                )
            for each in warps:
                yield f"x {xblock}, warps {each}", replace(chosen, xblock=xblock, num_warps=each)


class Clock:
    """Device time of launches queued behind a sleeping kernel."""

    def __init__(self) -> None:
        flat = torch.empty(2**29, dtype=torch.bfloat16, device="cuda")
        self.bytes_per_ns = 2 * flat.nbytes / self.ns(partial(torch.empty_like(flat).copy_, flat))

    def ns(self, call: Callable[[], Any]) -> float:
        times = []
        call()
        for _ in range(5):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(1_000_000)
            start.record()
            for _ in range(CALLS):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e6 / CALLS)
        return statistics.median(times)


def timed(kernel: Kernel, clock: Clock, cache: Path) -> list[tuple[str, float]]:
    """(variant, ns), fastest first; variants that do not compile are left out."""
    generator = TritonGenerator()
    hints = {symbol: kernel.graph.hint(symbol) for symbol in kernel.op.body.size_symbols()}
    chosen = tilings.choose(kernel.op.body, hints)
    sources: dict[str, KernelSource] = {}
    for label, tiling in variants(kernel.op.body, chosen):
        try:
            sources[label] = generator.generate(kernel.op.body, "trial", tiling=tiling)
        except AssertionError as error:  # this form has no code for these sizes
            print(f"    {label}: {error}")
    memory, times = kernel.memory(), []
    try:
        loaded = dict(generator.load(list(sources.values()), cache))
    except OverlapcError:  # one of them failed: load each by itself
        loaded = {}
    for label, source in sources.items():
        try:
            launcher = loaded.get(source.name) or generator.load([source], cache)[source.name]
        except OverlapcError as error:
            print(f"    {label}: {str(error).splitlines()[0]}")
            continue
        times.append((label, clock.ns(partial(launcher, *(memory[name] for name in source.buffers)))))
    return sorted(times, key=lambda item: item[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="regular expression for names of problems")
    parser.add_argument("--seconds", type=float, default=300, help="start no kernel after this long")
    parser.add_argument("--cache", type=Path, default=Path("/tmp/overlapc_tilings"))
    parser.add_argument("--least", type=float, default=2, help="leave out kernels that a copy takes less for, in us")
    parser.add_argument("--best", type=int, default=6, help="number of fastest tilings to print")
    args = parser.parse_args()
    began, clock = time.monotonic(), Clock()
    print(f"device copy {clock.bytes_per_ns / 1e3:.2f} TB/s")
    for name, make in (case for cases in LISTS.values() for case in cases.items()):
        if not re.search(args.cases, name):
            continue
        for kernel in kernels_of(make(Inputs(SCALES["gpu"], "cuda")), name):
            if time.monotonic() - began > args.seconds:
                return
            work = work_of(kernel.op, kernel.graph)
            least = (work.read_bytes + work.write_bytes) / clock.bytes_per_ns
            if least < 1e3 * args.least:
                continue
            times = timed(kernel, clock, args.cache)
            rows = times[: args.best] + [item for item in times[args.best :] if item[0] == "*"]
            cells = (f"{label} {ns / 1e3:.1f}us {least / ns:.0%}" for label, ns in rows)
            print(f"{kernel.name}\n    {' | '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
