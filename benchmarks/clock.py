"""Measure how a GPU's clock follows its load, and how that changes the time of matmuls, attention and copies.

    python benchmarks/clock.py                  # about a minute on one GPU
    python benchmarks/clock.py --only layer

A GPU lowers its clock at its power limit. Each pattern below is a loop of calls, run for about a second after a pause;
spinning kernels of a known number of cycles between the calls measure the clock at that moment. The output has the
clock over time, the power, and the duration of each call in the first and in the last rounds.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tabulate import tabulate
from torch import Tensor

from overlapc.estimators.calibration.clock import clock_for, compute_ns
from overlapc.estimators.calibration.profiled_contention import Span, kernels_of

_PROBE_CYCLES = 20_000  # about ten microseconds
_MOMENTS_S = (0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
PROBE = "probe"
_AT_LAST = 0.6  # fraction of a pattern's duration after which its state counts as settled
_IDLE_CYCLES_PER_S = 1.7e9
_POWER_CAP = 0x4  # NVML's bit for "the clock is low because of the power limit"

Call = Callable[[], Any]


@dataclass(frozen=True)
class Pattern:
    """A loop of named calls; "probe" measures the clock. `idle_s`: a pause at the end of each round, in which only one
    thread of the device spins."""

    name: str
    calls: Sequence[str]
    idle_s: float = 0.0

    def named(self) -> list[str]:
        return [name for name in dict.fromkeys(self.calls) if name != PROBE]


@dataclass
class Power:
    """A thread that samples NVML within a `with` block: (moment s, energy mJ, clock MHz, reasons for a low clock)."""

    samples: list[tuple[float, int, int, int]] = field(default_factory=list)

    def __enter__(self) -> Power:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _sample(self) -> None:
        try:
            nvml = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        device = ctypes.c_void_p()
        if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByIndex_v2(torch.cuda.current_device(), ctypes.byref(device)):
            return
        energy, mhz, why = ctypes.c_ulonglong(), ctypes.c_uint(), ctypes.c_ulonglong()
        while not self._end.wait(0.02):
            nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(energy))
            nvml.nvmlDeviceGetClockInfo(device, 1, ctypes.byref(mhz))
            nvml.nvmlDeviceGetCurrentClocksThrottleReasons(device, ctypes.byref(why))
            self.samples.append((time.perf_counter(), energy.value, mhz.value, why.value))

    def watts(self) -> float | None:
        """Mean power over the last part of the samples."""
        last = self.samples[int(_AT_LAST * len(self.samples)) :]
        if len(last) < 2:
            return None
        return (last[-1][1] - last[0][1]) / 1e3 / (last[-1][0] - last[0][0])

    def capped(self) -> float | None:
        """Share of samples in which the power limit lowered the clock."""
        return statistics.mean(bool(each[3] & _POWER_CAP) for each in self.samples) if self.samples else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=1.0, help="duration of each pattern")
    parser.add_argument("--only", default="", help="only patterns whose name contains this")
    parser.add_argument("--out", type=Path, help="folder for clock.json")
    args = parser.parse_args()
    calls = made_calls()
    alone = {name: compute_ns(clock_for(torch.device("cuda")), call) for name, call in calls.items()}
    found = []
    for pattern in patterns():
        if args.only in pattern.name:
            found.append(run(pattern, calls, alone, args.seconds))
            print(shown(found[-1]), flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "clock.json").write_text(json.dumps({"alone": alone, "patterns": found}))


def made_calls() -> dict[str, Call]:
    """Return matmuls and attention of a Llama-8B layer at 4096 tokens, and a copy, on random numbers."""

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(size, device="cuda") * scale).bfloat16()

    x, wide, w, narrow_w, wide_w = (
        random(4096, 4096),
        random(4096, 14336),
        *(random(size, 4096, scale=0.02) for size in (4096, 1024, 14336)),
    )
    grad, narrow_grad, wide_grad = (random(4096, size, scale=1e-5) for size in (4096, 1024, 14336))
    query, key, value = (random(1, heads, 4096, 128) for heads in (32, 8, 8))
    source = torch.randn(2**27, device="cuda")
    target = torch.empty_like(source)
    attended = tuple(each.detach().requires_grad_() for each in (query, key, value))
    out = attend(*attended)
    out_grad = torch.randn_like(out) * 1e-5
    zeros, wide_zeros = torch.zeros_like(x), torch.zeros_like(wide_w)
    return {
        "q": partial(torch.mm, x, w.t()),
        "k": partial(torch.mm, x, narrow_w.t()),
        "up": partial(torch.mm, x, wide_w.t()),
        "down": partial(torch.mm, wide, wide_w),
        "q dx": partial(torch.mm, grad, w),
        "k dx": partial(torch.mm, narrow_grad, narrow_w),
        "up dx": partial(torch.mm, wide_grad, wide_w),
        "q dw": partial(torch.mm, grad.t(), x),
        "k dw": partial(torch.mm, narrow_grad.t(), x),
        "up dw": partial(torch.mm, wide_grad.t(), x),
        "up dx normal": partial(torch.mm, wide, wide_w),
        "up zeros": partial(torch.mm, zeros, wide_zeros.t()),
        "attend": partial(attend, query, key, value),
        "attend back": partial(torch.autograd.grad, out, attended, out_grad, retain_graph=True),
        "copy": partial(target.copy_, source),
    }


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def patterns() -> Sequence[Pattern]:
    forward = ("q", "k", "k", "attend", "q", "copy", "up", "up", "down", "copy")
    backward = (
        "up dx", "up dw", "copy", "up dx", "up dx", "up dw", "up dw", "copy", "q dx", "q dw", "attend back", "copy",
        "q dx", "q dw", "k dx", "k dw", "k dx", "k dw", "copy",
    )  # fmt: skip
    after = ("up",) * 100
    for name in ("k", "k dx", "up dx", "q dw"):
        after += (PROBE,) + (name,) * 20
    after += (PROBE, *("attend back",) * 5, PROBE, *("attend",) * 5)
    return (
        Pattern("matmul", ("up",)),
        Pattern("matmul, 2/3 of the time", ("up", "up", "up", "up"), 1.2e-3),
        Pattern("matmul, 1/3 of the time", ("up", "up"), 2.4e-3),
        Pattern("after matmuls", after),
        Pattern("small matmul", ("k",)),
        Pattern("matmul of zeros", ("up zeros",)),
        Pattern("matmul of gradients", ("up dx", "up dw")),
        Pattern("matmul of normals", ("up dx normal",)),
        Pattern("copies", ("copy",)),
        Pattern("matmuls and copies", ("up", "up", "copy", "copy")),
        Pattern("attention", ("attend",)),
        Pattern("attention backward", ("attend back",)),
        Pattern("layer forward", forward),
        Pattern("layer backward", backward),
        Pattern("layer forward, 5/6 of the time", forward, 0.6e-3),
        Pattern("layer backward, 5/6 of the time", backward, 1.3e-3),
        Pattern("layer forward, 2/3 of the time", forward, 1.4e-3),
        Pattern("layer backward, 2/3 of the time", backward, 3e-3),
    )


def run(pattern: Pattern, calls: Mapping[str, Call], alone: Mapping[str, float], seconds: float) -> dict[str, Any]:
    """Run one pattern after a pause; return what was measured."""
    round_s = sum(alone.get(name, 0.0) for name in pattern.calls) / 1e9 + pattern.idle_s
    rounds = max(3, int(seconds / round_s))
    every = max(1, int(2e-3 / round_s))  # one probe every two milliseconds is enough
    probed = {**calls, PROBE: partial(torch.cuda._sleep, _PROBE_CYCLES)}
    idle_cycles = int(pattern.idle_s * _IDLE_CYCLES_PER_S)
    regular = not idle_cycles and PROBE not in pattern.calls

    def loop() -> None:
        for number in range(rounds):
            for name in pattern.calls:
                probed[name]()
            if idle_cycles:
                torch.cuda._sleep(idle_cycles)
            elif regular and number % every == 0:
                probed[PROBE]()

    for name in pattern.named():
        calls[name]()
    torch.cuda.synchronize()
    time.sleep(0.4)
    with torch.no_grad() if "attend back" not in pattern.calls else torch.enable_grad(), Power() as power:
        spans = kernels_of(loop)
    cycles = idle_cycles or _PROBE_CYCLES
    probes = [span for span in spans if span.is_mark]
    begin_ns = spans[0].start_ns
    clocks = [((span.start_ns - begin_ns) / 1e9, cycles / span.ns * 1e3) for span in probes]
    return {
        "pattern": pattern.name,
        "seconds": (spans[-1].end_ns - begin_ns) / 1e9,
        "mhz": [statistics.median(at_moment(clocks, moment)) for moment in _MOMENTS_S if moment < clocks[-1][0]],
        "mhz at last": statistics.median(mhz for at, mhz in clocks if at >= _AT_LAST * clocks[-1][0]),
        "watts": power.watts(),
        "capped": power.capped(),
        "calls": call_times(spans),
        "burst": {name: alone[name] / 1e3 for name in pattern.named()},
    }


def at_moment(clocks: Sequence[tuple[float, float]], moment: float) -> list[float]:
    """Return the clocks measured around a moment, or the nearest one if there are none."""
    near = [mhz for at, mhz in clocks if 0.8 * moment <= at <= 1.2 * moment]
    return near or [min(clocks, key=lambda each: abs(each[0] - moment))[1]]


def call_times(spans: Sequence[Span]) -> dict[str, tuple[float, float]]:
    """Return, for each run of equal kernels in a round, microseconds per kernel in the first and in the last rounds.

    Every round launches the same kernels; the result is empty if the profiler lost some.
    """
    work = [span for span in spans if not span.is_mark and not span.name.startswith("Memset")]
    names = [span.name for span in work]
    sizes = (size for size in range(1, len(names) // 3 + 1) if len(names) % size == 0)
    size = next((size for size in sizes if names[:size] * (len(names) // size) == names), 0)
    if not size:
        return {}
    rounds = [work[at : at + size] for at in range(0, len(work), size)]
    few = max(1, len(rounds) // 50)
    late = rounds[int(_AT_LAST * len(rounds)) :]
    found = {}
    for number, (name, run) in enumerate(itertools.groupby(range(size), key=names.__getitem__)):
        at = list(run)
        first, last = (statistics.median(each[i].ns for each in some for i in at) for some in (rounds[:few], late))
        found[f"{number} {len(at)} x {name[:60]}"] = (first / 1e3, last / 1e3)
    return found


def shown(found: Mapping[str, Any]) -> str:
    watts, capped = found["watts"], found["capped"]
    head = (
        f"{found['pattern']}: {found['seconds']:.2f} s, clock over time "
        + " ".join(f"{mhz:.0f}" for mhz in found["mhz"])
        + f", at last {found['mhz at last']:.0f} MHz"
        + ("" if watts is None else f", {watts:.0f} W")
        + ("" if capped is None else f", held down by the power limit {capped:.0%}")
    )
    table = [(name, first, last, last / first) for name, (first, last) in found["calls"].items()]
    alone = ", ".join(f"{name} {us:.1f}" for name, us in found["burst"].items())
    return (
        f"{head}\n{tabulate(table, ('kernel', 'first us', 'last us', 'ratio'), floatfmt='.2f')}\nin a burst: {alone}\n"
    )


if __name__ == "__main__":
    main()
