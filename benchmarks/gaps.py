"""Measure the gap between two kernels on a GPU, and what makes it longer.

    python benchmarks/gaps.py
    CUDA_DEVICE_MAX_CONNECTIONS=32 python benchmarks/gaps.py      # by default, streams share 8 hardware queues
    torchrun --nproc-per-node 2 benchmarks/gaps.py                # also with collectives that wait for the kernels

A chain of generated kernels, no two neighbours alike, is launched behind a held stream, so that the host stays ahead.
`unprofiled` is the chain's time by CUDA events minus its kernels' time, per kernel (with two gathers, it includes their
time); the other columns are gaps seen by the profiler: their median, 10th and 90th percentile.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tabulate import tabulate

from overlapc.estimators.calibration.clock import CudaClock, wait_all
from overlapc.estimators.calibration.profiled_contention import Span, kernels_of
from overlapc.estimators.calibration.workloads import DTYPES, launcher
from overlapc.launch.calibrate_kernels import UNLIKE, compile_alone, unlike

_CALLS = 50  # of the chain, per sample
_ROUNDS = 3
_HELD_S = 0.03
_LONG_GAP_NS = 20_000  # longer gaps are ignored: the host was late, or another chain begins
_HOT_S = 0.5

Run = Callable[[], Any]


class Gaps:
    """The chain of kernels, and the work that can run beside it."""

    def __init__(self, size_bytes: int) -> None:
        self.clock = CudaClock()
        self.device = torch.device("cuda", torch.cuda.current_device())
        x = torch.ones(size_bytes // 4, device=self.device)
        compiled, _, _ = compile_alone(unlike, (x,), fusion=False)
        self.links: Run = lambda: compiled(x)
        self.sides = [torch.cuda.Stream() for _ in range(3)]
        self.small = torch.ones(64, device=self.device)
        self.a = torch.randn(8192, 8192, device=self.device).bfloat16()

    def chain(self) -> None:
        for _ in range(_CALLS):
            self.links()

    def followed(self, streams: int) -> Run:
        """Return a run of the chain with `streams` other streams that wait for its end."""

        def run() -> None:
            self.chain()
            done = torch.cuda.Event()
            done.record()
            for side in self.sides[:streams]:
                self._work_on(side, done)

        return run

    def crossed(self, streams: int) -> Run:
        """Return a run as in a training step: after every eight kernels another stream gets work, for which the chain
        waits eight kernels later."""

        def run() -> None:
            before: torch.cuda.Event | None = None
            for turn in range(_CALLS):
                self.links()
                here = torch.cuda.Event()
                here.record()
                done = self._work_on(self.sides[turn % streams], here)
                if before is not None:
                    torch.cuda.current_stream().wait_event(before)
                before = done
            torch.cuda.current_stream().wait_event(before)

        return run

    def _work_on(self, side: torch.cuda.Stream, after: torch.cuda.Event) -> torch.cuda.Event:
        side.wait_event(after)
        with torch.cuda.stream(side):
            self.small.mul_(1.0)
            done = torch.cuda.Event()
            done.record()
        return done

    def gathered(self, size_bytes: int) -> Run:
        """Return a run of the chain with two all-gathers that wait for its end."""
        assert dist.group.WORLD is not None
        gather = launcher("all_gather", dist.group.WORLD, size_bytes, DTYPES["bf16"], self.device)

        def run() -> None:
            self.chain()
            wait_all([gather(), gather()])

        return run

    def captured(self, run: Run) -> Run:
        """Return `run` as the replay of a CUDA graph."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
            run()
        return graph.replay

    def heat(self) -> None:
        """Launch matmuls until the GPU has its clock under full load."""
        for _ in range(round(_HOT_S / 1.6e-3)):
            torch.mm(self.a, self.a)

    def row(self, name: str, run: Run, *, hot: bool = False) -> list[str]:
        """Measure one case; return its table row, in ns."""

        def launch() -> tuple[Any, Any]:
            if hot:
                self.heat()
            else:
                self.clock.hold(_HELD_S)
            begin = self.clock.mark()
            run()
            return begin, self.clock.mark()

        launch()
        self.clock.sync()
        samples = []
        for _ in range(_ROUNDS):
            begin, end = launch()
            self.clock.sync()
            samples.append(self.clock.between_ns(begin, end) / (_CALLS * len(UNLIKE)))
        spans = [span for span in kernels_of(launch) if _is_ours(span)]
        kernel_ns = statistics.mean(span.ns for span in spans)
        gaps = sorted(after.start_ns - before.end_ns for before, after in itertools.pairwise(spans))
        gaps = [gap for gap in gaps if 0 <= gap < _LONG_GAP_NS]
        tenths = [gaps[len(gaps) * tenth // 10] for tenth in (5, 1, 9)]
        return [name, f"{statistics.median(samples) - kernel_ns:.0f}", *map(str, tenths), f"{kernel_ns:.0f}"]


def _is_ours(span: Span) -> bool:
    return span.name in {function.__name__ for function in UNLIKE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=int, default=2**20, help="bytes that each kernel reads (default: %(default)s)")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    if ranks > 1:
        dist.init_process_group("nccl", device_id=device)
    gaps = Gaps(args.bytes)
    with torch.no_grad():
        rows = [
            gaps.row("alone", gaps.chain),
            gaps.row("alone, after half a second of matmuls", gaps.chain, hot=True),
            *(gaps.row(f"{count} other stream(s) wait for its end", gaps.followed(count)) for count in (1, 2)),
            *(gaps.row(f"work on {count} other stream(s) after each 8", gaps.crossed(count)) for count in (1, 2)),
            gaps.row("as a CUDA graph", gaps.captured(gaps.chain)),
        ]
        if ranks > 1:
            dist.barrier()
            rows.append(gaps.row("2 gathers wait for its end", gaps.gathered(2**20)))
    if ranks == 1 or dist.get_rank() == 0:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, hardware queues:", end=" ")
        print(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8"))
        print(tabulate(rows, ["chain", "unprofiled ns", "median", "10%", "90%", "kernel"], disable_numparse=True))
    if ranks > 1:
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
