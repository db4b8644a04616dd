"""What compute and collectives cost each other on a GPU, by the profiler: times of kernels that had company throughout.

A collective that comes while a kernel runs waits for the kernel's last wave; the clocks of clock.py would count that
wait as a slowdown. Kernels' own times do not.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from overlapc.estimators.clock import Launch, wait_all
from overlapc.estimators.contention import waves

_ALL = 0.98  # of a kernel's time with company, to count as company throughout
_MAIN = 0.3  # kernels shorter than this share of the longest are preparation (fills, casts), not what is measured


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel on the device."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns


def kernels_of(run: Callable[[], Any]) -> list[Span]:
    """Every kernel that `run` launches, in order of their starts."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    results = recorded.profiler.kineto_results
    spans = [
        Span(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0
    ]
    return sorted(spans, key=lambda span: span.start_ns)


def kernel_ns(call: Callable[[], Any], calls: int = 10) -> float:
    """Time that one call's kernels take together, without the gaps between them."""
    call()
    spans = kernels_of(lambda: [call() for _ in range(calls)])
    return sum(span.ns for span in spans) / calls


@dataclass(frozen=True, slots=True)
class Company:
    """How many times as long each takes beside the other; None where none of them had company throughout."""

    compute: float | None
    collective: float | None


def company(call: Callable[[], Any], launch: Launch, collective_ns: float, collectives: int = 6) -> Company:
    """Of a call (whose longest kernel is meant) and a collective that takes `collective_ns` alone.

    All ranks must ask for the same number of collectives.
    """
    call()
    alone = _main(kernels_of(lambda: [call() for _ in range(10)]))
    alone_ns = statistics.median(span.ns for span in alone)
    calls = math.ceil(1.5 * collectives * collective_ns / alone_ns) + 2

    def both() -> None:
        torch.cuda._sleep(int(2e6 + 1e5 * collectives + 2e4 * calls))
        works = [launch() for _ in range(collectives)]
        for _ in range(calls):
            call()
        wait_all(works)

    spans = kernels_of(both)
    moving = [span for span in spans if "nccl" in span.name.lower()]
    computing = _main([span for span in spans if "nccl" not in span.name.lower() and "spin" not in span.name.lower()])
    slowed = [span.ns for span in computing if _share(span, moving) >= _ALL]
    stretched = [span.ns for span in moving if _share(span, computing) >= 0.9]
    return Company(
        statistics.median(slowed) / alone_ns if slowed else None,
        statistics.median(stretched) / collective_ns if stretched else None,
    )


def held_multiprocessors(slowed: Sequence[tuple[int, float]], multiprocessors: int) -> int:
    """How many a collective must hold for matmuls of so many tiles to take so many times as long."""

    def error(held: int) -> float:
        left = multiprocessors - held
        return sum(abs(math.log(waves(tiles, left) / waves(tiles, multiprocessors) / times)) for tiles, times in slowed)

    return min(range(multiprocessors), key=error)


def _main(spans: Sequence[Span]) -> list[Span]:
    longest = max((span.ns for span in spans), default=0)
    return [span for span in spans if span.ns >= _MAIN * longest]


def _share(span: Span, others: Sequence[Span]) -> float:
    """The part of `span` in which one of `others` runs (these do not overlap each other much)."""
    met = sum(max(0, min(span.end_ns, each.end_ns) - max(span.start_ns, each.start_ns)) for each in others)
    return min(1.0, met / span.ns)
