"""Measures contention on a GPU from the profiler's times of kernels that were overlapped for their whole duration.

A collective issued while a kernel runs waits for the kernel's last wave. The clocks of clock.py would count that wait
as a slowdown; the times of the kernels themselves do not contain it. Each call is measured alone, beside collectives
and alone again without a pause, after other work: a GPU under load lowers its clock within milliseconds, which must not
be counted as contention.

A collective that waits for another rank occupies multiprocessors but moves no data: it slows matmuls, but not
memory-bound kernels. So the ranks synchronize before each phase with collectives, and collectives that waited
nevertheless are ignored.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from overlapc.estimators.calibration.clock import Launch, wait_all
from overlapc.estimators.contention import waves

_ALL = 0.98  # fraction of a kernel's time that must be overlapped to count as overlapped throughout
_MAIN = 0.3  # kernels shorter than this fraction of the longest are preparation (fills, casts) and are ignored
_MARK_CYCLES = 20_000  # duration of the kernels between phases, about ten microseconds
_PHASE_NS = 5e6  # intended duration of a phase in which a call runs alone
_LEAST_CALLS, _MOST_CALLS = 4, 100  # in such a phase
_MOST_BESIDE = 600  # calls beside collectives; a GPU's launch queue holds about a thousand
# Number of calls that the collectives of a phase cover. Small, because the clock changed within a phase of 40 ms.
_COVERED_CALLS = 3
# A collective slowed by more than this factor waited for another rank: the factor was 4.6 with four channels beside
# copies, and 19 to 35 with ranks out of step.
_WAITED = 8.0

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel on the device."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def ns(self) -> int:
        return self.end_ns - self.start_ns

    @property
    def is_mark(self) -> bool:
        """Whether the kernel only separates phases."""
        return "spin" in self.name.lower()

    @property
    def moves(self) -> bool:
        """Whether the kernel or copy belongs to a collective."""
        return "nccl" in self.name.lower() or "memcpy" in self.name.lower()


def kernels_of(run: Callable[[], Any]) -> list[Span]:
    """Return every kernel and copy that `run` launches, in order of their starts."""
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


def kernel_ns(call: Call, calls: int = 10) -> float:
    """Return the total ns of one call's kernels, without the gaps between them."""
    call()
    spans = kernels_of(lambda: [call() for _ in range(calls)])
    return sum(span.ns for span in spans) / calls


@dataclass(frozen=True, slots=True)
class Contention:
    """The slowdown factors of a call and of a collective that overlap, by the call's main kernel.

    A factor is None if nothing was overlapped throughout by collectives that did not wait for another rank.
    """

    alone_ns: float
    compute: float | None
    collective: float | None
    mhz_before: float  # the device's clock before the overlap
    mhz: float  # the device's clock after it
    kernel: str  # the name of the call's main kernel


def measured_contention(
    calls: Mapping[str, Call],
    calls_ns: Mapping[str, float],
    launch: Launch,
    collective_ns: float,
    load: Call | None,
    piece_ns: float | None = None,
) -> dict[str, Contention]:
    """Measure the contention of each call with a collective that takes `collective_ns` alone.

    calls_ns, collective_ns: must be equal on all ranks, because the number of collectives depends on them.
    load: launches work that runs before everything else.
    piece_ns: time alone of each copy of a collective that consists of copies; None for a collective that is a kernel.
    """

    def run() -> None:
        if load is not None:
            load()
        for name, call in calls.items():
            alone = max(_LEAST_CALLS, min(_MOST_CALLS, math.ceil(_PHASE_NS / calls_ns[name])))
            collectives = math.ceil(_COVERED_CALLS * calls_ns[name] / collective_ns)
            beside = min(_MOST_BESIDE, math.ceil(2 * collectives * collective_ns / calls_ns[name]) + 2)
            _phase(call, alone)
            launch().wait()  # synchronizes the ranks, whose earlier phases differ in length because clocks differ
            torch.cuda._sleep(_MARK_CYCLES)
            works = [launch() for _ in range(collectives)]
            for _ in range(beside):
                call()
            wait_all(works)
            _phase(call, alone)

    for call in calls.values():
        call()
    if piece_ns is None:
        return contention_in(list(calls), kernels_of(run), collective_ns)
    return contention_in(list(calls), kernels_of(run), piece_ns, statistics.mean)


def _phase(call: Call, calls: int) -> None:
    torch.cuda._sleep(_MARK_CYCLES)
    for _ in range(calls):
        call()


def contention_in(
    names: Sequence[str],
    spans: Sequence[Span],
    collective_ns: float,
    of: Callable[[Sequence[float]], float] = statistics.median,
) -> dict[str, Contention]:
    """Compute the contention from the kernels of `measured_contention`.

    Each call has three phases: alone, beside collectives, alone. A mark precedes each phase.

    collective_ns: time alone of one kernel or copy of a collective.
    of: combines the times of overlapped calls. It is the mean for copies, because only copies within a GPU slow
    memory-bound kernels much.
    """
    moving = [span for span in spans if span.moves and span.ns <= _WAITED * collective_ns]
    phases: list[list[Span]] = []
    clocks: list[float] = []  # MHz at each mark
    for span in spans:
        if span.is_mark:
            phases.append([])
            clocks.append(_MARK_CYCLES / span.ns * 1e3)
        elif phases and not span.moves:
            phases[-1].append(span)
    found = {}
    for at, name in enumerate(names):
        before, beside, after = (_main(phase) for phase in phases[3 * at : 3 * at + 3])
        alone_ns = statistics.median(span.ns for span in (*before, *after))
        slowed = [span.ns for span in beside if _share(span, moving) >= _ALL]
        begin, end = beside[0].start_ns, beside[-1].end_ns
        overlapping = _main([span for span in moving if span.end_ns > begin and span.start_ns < end])
        stretched = [span.ns for span in overlapping if _share(span, beside) >= 0.9]
        found[name] = Contention(
            alone_ns,
            of(slowed) / alone_ns if slowed else None,
            statistics.median(stretched) / collective_ns if stretched else None,
            clocks[3 * at + 1],
            clocks[3 * at + 2],
            max(before, key=lambda span: span.ns).name,
        )
    return found


def piece_ns(launch: Launch) -> float:
    """Return the median ns of the copies of a collective that consists of copies, without small ones."""
    launch().wait()
    return statistics.median(
        span.ns
        for span in _main([each for each in kernels_of(lambda: wait_all([launch() for _ in range(3)])) if each.moves])
    )


def held_multiprocessors(slowed: Sequence[tuple[int, float]], multiprocessors: int) -> int:
    """Return the number of multiprocessors that a collective occupies, fitted to (tiles of a matmul, slowdown)."""

    def error(held: int) -> float:
        left = multiprocessors - held
        return sum(abs(math.log(waves(tiles, left) / waves(tiles, multiprocessors) / times)) for tiles, times in slowed)

    return min(range(multiprocessors), key=error)


def _main(spans: Sequence[Span]) -> list[Span]:
    longest = max((span.ns for span in spans), default=0)
    return [span for span in spans if span.ns >= _MAIN * longest]


def _share(span: Span, others: Sequence[Span]) -> float:
    """Return the fraction of `span` in which one of `others` runs; `others` may hardly overlap each other."""
    overlap_ns = sum(max(0, min(span.end_ns, each.end_ns) - max(span.start_ns, each.start_ns)) for each in others)
    return min(1.0, overlap_ns / span.ns)
