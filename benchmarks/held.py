"""How matmuls and attention slow down when some multiprocessors are taken: by kernels that only wait, on one GPU.

    python benchmarks/held.py                   # under half a minute

A collective takes multiprocessors and bandwidth; this takes multiprocessors alone, so the rest can be told apart.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from clock import Call, made_calls
from tabulate import tabulate

from overlapc.estimators.beside import kernels_of
from overlapc.estimators.clock import clock_for, compute_ns

HELD = (0, 4, 8, 16, 24, 28, 32, 36, 40)
_WARPS = 32  # with a matmul's registers no other block of so many threads fits on a multiprocessor


@triton.jit
def hold(out, ns):
    """Keeps a multiprocessor for so many ns."""
    begin = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    now = begin
    while now - begin < ns:
        now = tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)
    tl.store(out + tl.program_id(0), now)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for held.json")
    args = parser.parse_args()
    calls = {name: call for name, call in made_calls().items() if name not in ("up zeros", "up dx normal")}
    rows = []
    for name, call in calls.items():
        call()
        found = times(call, compute_ns(clock_for(torch.device("cuda")), call))
        alone = found[0][0]
        rows.append([name, alone / 1e3, *(ns / alone if ns else None for ns, _ in found[1:]), found[0][1]])
    print(tabulate(rows, ("call", "alone us", *(f"{held} held" for held in HELD[1:]), "kernel"), floatfmt=".3f"))
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "held.json").write_text(json.dumps({"held": HELD, "rows": rows}))


def times(call: Call, call_ns: float) -> Sequence[tuple[float, str]]:
    """(ns, name) of the call's longest kernel with each number of multiprocessors held; 0 ns where none was seen."""
    side = torch.cuda.Stream()
    out = torch.empty(max(HELD), dtype=torch.int64, device="cuda")
    calls = max(4, min(60, int(6e6 / call_ns)))
    held_ns = int(2.2 * calls * call_ns + 5e5)

    def run() -> None:
        torch.cuda._sleep(20_000_000)
        for held in HELD:
            ready = torch.cuda.Event()
            ready.record()
            side.wait_event(ready)
            if held:
                with torch.cuda.stream(side):
                    hold[(held,)](out, held_ns, num_warps=_WARPS)
            torch.cuda._sleep(200_000)  # the waiting kernels come first
            for _ in range(calls):
                call()
            done = torch.cuda.Event()
            done.record(side)
            torch.cuda.current_stream().wait_event(done)

    hold[(1,)](out, 1000, num_warps=_WARPS)
    spans = kernels_of(run)
    holding = [span for span in spans if span.name == "hold"]
    phases: list[list[Any]] = []
    for span in spans:
        if span.is_mark:
            phases.append([])
        elif phases and span.name != "hold":
            phases[-1].append(span)
    found = []
    for phase, holder in zip(phases[1:], [None, *holding], strict=True):
        inside = [span for span in phase if holder is None or span.end_ns < holder.end_ns]
        longest = max((span.ns for span in inside), default=0)
        main = [span for span in inside if span.ns > 0.3 * longest]
        found.append((statistics.median(span.ns for span in main) if main else 0.0, main[0].name if main else ""))
    return found


if __name__ == "__main__":
    main()
