"""Contention between compute and collectives on a GPU, from the profiler: times of kernels overlapped throughout.

A collective that comes while a kernel runs waits for the kernel's last wave; the clocks of clock.py would count that
wait as a slowdown. Kernels' own times do not. Each call is measured alone, beside collectives and alone again in one
go, after other work: a GPU that draws much power lowers its clock within milliseconds, which is no contention.

A collective that waits for another rank holds multiprocessors and moves nothing: matmuls beside it are slowed, kernels
bound by memory are not. So ranks meet before each phase of collectives, and what waited nevertheless does not count.
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

_ALL = 0.98  # share of a kernel's time that must be overlapped to count as overlapped throughout
_MAIN = 0.3  # kernels shorter than this share of the longest are preparation (fills, casts), not what is measured
_MARK_CYCLES = 20_000  # of the kernels between phases; about ten microseconds
_PHASE_NS = 5e6  # of a call alone
_LEAST_CALLS, _MOST_CALLS = 4, 100  # of a phase
_MOST_BESIDE = 600  # calls beside collectives; a GPU's queue of launches holds about a thousand
# That the collectives of a phase should have room for. Few: a phase of 40 ms gave the clock time to change within it.
_COVERED_CALLS = 3
# Times its time alone, beyond which a collective waited for another rank: four channels beside copies took 4.6 times as
# long, collectives of ranks that were out of step 19 to 35 times.
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
        """Whether it only separates phases."""
        return "spin" in self.name.lower()

    @property
    def moves(self) -> bool:
        """Whether it is a collective's."""
        return "nccl" in self.name.lower() or "memcpy" in self.name.lower()


def kernels_of(run: Callable[[], Any]) -> list[Span]:
    """Every kernel and copy that `run` launches, in order of their starts."""
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
    """Time that one call's kernels take together, without the gaps between them."""
    call()
    spans = kernels_of(lambda: [call() for _ in range(calls)])
    return sum(span.ns for span in spans) / calls


@dataclass(frozen=True, slots=True)
class Contention:
    """How many times as long a call and a collective take beside each other, by the call's main kernel.

    None if none of them was overlapped throughout by collectives that did not wait for another rank.
    """

    alone_ns: float
    compute: float | None
    collective: float | None
    mhz_before: float  # the device's clock before they ran beside each other
    mhz: float  # and after it
    kernel: str  # the name of the call's main kernel


def measured_contention(
    calls: Mapping[str, Call],
    calls_ns: Mapping[str, float],
    launch: Launch,
    collective_ns: float,
    load: Call | None,
    piece_ns: float | None = None,
) -> dict[str, Contention]:
    """Of each call with a collective that takes `collective_ns` alone. load: work that runs before all of it. piece_ns:
    what each of the copies that a collective consists of takes alone; None for one that is a kernel.

    The times (of calls, too) must be equal on all ranks: the number of collectives depends on them.
    """

    def run() -> None:
        if load is not None:
            load()
        for name, call in calls.items():
            alone = max(_LEAST_CALLS, min(_MOST_CALLS, math.ceil(_PHASE_NS / calls_ns[name])))
            collectives = math.ceil(_COVERED_CALLS * calls_ns[name] / collective_ns)
            beside = min(_MOST_BESIDE, math.ceil(2 * collectives * collective_ns / calls_ns[name]) + 2)
            _phase(call, alone)
            launch().wait()  # ranks meet: clocks differ, so the phases before took them differently long
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
    """From the kernels of `measured_contention`: each call has a phase alone, one beside collectives and one alone,
    in this order.

    A mark stands before each phase. collective_ns: of one kernel or copy of a collective, alone. of: what stands for
    all calls beside them; the mean for copies, as those within a GPU stop kernels that need its memory, others hardly.
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
        met = _main([span for span in moving if span.end_ns > begin and span.start_ns < end])
        stretched = [span.ns for span in met if _share(span, beside) >= 0.9]
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
    """What each copy of a collective takes that is done by copies, without small ones; the median."""
    launch().wait()
    return statistics.median(
        span.ns
        for span in _main([each for each in kernels_of(lambda: wait_all([launch() for _ in range(3)])) if each.moves])
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
