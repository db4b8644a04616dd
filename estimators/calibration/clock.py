"""One timing interface for CPUs and GPUs, so that code which measures GPUs can be tested without one.

On a GPU the launches of a measurement are queued behind a busy kernel, and times are taken between events on
its streams, so the host's launch time is hidden. On a CPU a mark is the time at which it was made.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

Launch = Callable[[], dist.Work]  # launches one collective
_CYCLES_PER_S = 2e9  # at least the clock rate of a GPU, so that delays are long enough
_MOST_HELD_S = 0.2
_SPAN_S = 0.01  # intended compute time of one sample
# The same of a burst, and the pause before it: at less than half load a GPU does not lower its clock. Products and
# attention of a Llama take within 0.8% of what they take in bursts of 10 ms after 30; 3 after 9 ms are up to 11% off.
_BURST_S, _PAUSE_S = 0.004, 0.012
_MOST_CALLS = 100  # in one sample; a GPU's launch queue holds about a thousand


class Clock(Protocol):
    """Marks points in time in the sequence of launches. Marks may be compared after `sync`."""

    @property
    def queued(self) -> bool:
        """Whether launches are asynchronous and run in order on a queue."""
        ...

    def hold(self, host_s: float) -> None:
        """Delay all later launches on the device, so that the host has `host_s` seconds to queue them."""
        ...

    def idle(self, seconds: float) -> None:
        """Keep the device idle for about `seconds`, after everything launched so far."""
        ...

    def mark(self) -> Any:
        """Return a mark for the moment at which all earlier launches on the compute stream are done."""
        ...

    def mark_when_done(self, work: dist.Work) -> Any:
        """Return a mark for the moment at which `work` is done, independent of the compute stream."""
        ...

    def between_ns(self, earlier: Any, later: Any) -> float:
        """Return the time from one mark to another, in ns."""
        ...

    def sync(self) -> None:
        """Wait until everything launched so far is done."""
        ...


class CpuClock:
    """The clock of a CPU: calls are synchronous; gloo's collectives run on other threads."""

    queued = False

    def hold(self, host_s: float) -> None:
        pass

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def mark(self) -> list[float]:
        return [time.perf_counter()]

    def mark_when_done(self, work: dist.Work) -> list[float]:
        at: list[float] = []
        work.get_future().then(lambda _: at.append(time.perf_counter()))
        return at

    def between_ns(self, earlier: list[float], later: list[float]) -> float:
        deadline = time.monotonic() + 30.0
        while not later and time.monotonic() < deadline:  # the callback may run shortly after a waiting thread resumes
            time.sleep(1e-4)
        return (later[0] - earlier[0]) * 1e9

    def sync(self) -> None:
        pass


class CudaClock:
    """The clock of a CUDA device: marks are events, on the current stream by default."""

    queued = True

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()

    def hold(self, host_s: float) -> None:
        torch.cuda._sleep(int(min(host_s, _MOST_HELD_S) * _CYCLES_PER_S))

    def idle(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * _CYCLES_PER_S))

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark_when_done(self, work: dist.Work) -> torch.cuda.Event:
        with torch.cuda.stream(self._side):
            work.wait()
            return self.mark()

    def between_ns(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return earlier.elapsed_time(later) * 1e6

    def sync(self) -> None:
        torch.cuda.synchronize()


def cache_bytes(device: torch.device) -> int:
    """Return the size of a GPU's L2 cache in bytes; 0 for a CPU, whose caches do not matter here."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size) if device.type == "cuda" else 0


def clock_for(device: torch.device) -> Clock:
    """Return the clock for a device."""
    return CudaClock() if device.type == "cuda" else CpuClock()


def burst_ns(clock: Clock, call: Callable[[], Any], idle_since_s: float | None = None) -> float:
    """Return the ns of one call in a short burst after a pause, during which a GPU keeps its clock without load.

    idle_since_s: the time (`perf_counter`) since which the device has had nearly nothing to do; None for now. The pause
    is shorter by what has passed since then.
    """
    idle_s = 0.0 if idle_since_s is None else time.perf_counter() - idle_since_s
    time.sleep(max(0.0, _PAUSE_S - idle_s))
    return compute_ns(clock, call, rounds=1, span_s=_BURST_S)


def compute_ns(
    clock: Clock,
    call: Callable[[], Any],
    rounds: int = 3,
    ahead: Callable[[], Any] | None = None,
    span_s: float = _SPAN_S,
) -> float:
    """Return the ns of one call in a sequence of equal calls with hidden launches: the median of `rounds` samples.

    ahead: launches work that runs right before each sample and is long enough to hide the launches.
    span_s: the intended compute time of one sample.
    """
    call()
    clock.sync()
    began = time.perf_counter()
    call()
    host_s = time.perf_counter() - began
    clock.sync()
    calls = max(3, min(_MOST_CALLS, int(span_s / max(time.perf_counter() - began, 1e-9))))
    samples = []
    for _ in range(rounds):
        if ahead is None:
            clock.hold(2 * calls * host_s + 1e-4)
        else:
            ahead()
        begin = clock.mark()
        for _ in range(calls):
            call()
        end = clock.mark()
        clock.sync()
        samples.append(clock.between_ns(begin, end) / calls)
    return statistics.median(samples)


def collective_ns(clock: Clock, launch: Launch, calls: int, rounds: int = 3) -> float:
    """Return the ns of one of `calls` collectives launched back to back, after one that synchronizes the ranks.

    Every rank must pass the same `calls` and `rounds`. Collectives that are not queued (gloo) are waited for singly.
    For queued ones the smallest sample counts, because a stall of any rank's host only lengthens the time of all.
    """
    launch().wait()
    clock.sync()
    began = time.perf_counter()
    wait_all([launch() for _ in range(calls)] if clock.queued else [])
    host_s = time.perf_counter() - began
    clock.sync()
    samples = []
    for _ in range(rounds):
        clock.hold(2 * host_s + 1e-3)
        launch().wait()
        begin = clock.mark()
        if clock.queued:
            wait_all([launch() for _ in range(calls)])
        else:
            for _ in range(calls):
                launch().wait()
        end = clock.mark()
        clock.sync()
        samples.append(clock.between_ns(begin, end) / calls)
    return min(samples) if clock.queued else statistics.median(samples)


def beside_ns(
    clock: Clock, launch: Launch, launches: int, call: Callable[[], Any], calls: int, rounds: int = 3
) -> tuple[float, float]:
    """Return the ns of one call and of one collective while `calls` calls and `launches` collectives overlap.

    Only the side that finishes first was overlapped for its whole duration.
    """
    computing, communicating = [], []
    for each in range(rounds + 1):  # the first warms up
        clock.hold(2e-3 + 2e-4 * launches + 5e-5 * calls)
        launch().wait()
        begin = clock.mark()
        works = [launch() for _ in range(launches)]
        communicated = clock.mark_when_done(works[-1])
        for _ in range(calls):
            call()
        computed = clock.mark()
        wait_all(works)
        clock.sync()
        if each:
            computing.append(clock.between_ns(begin, computed) / calls)
            communicating.append(clock.between_ns(begin, communicated) / launches)
    return statistics.median(computing), statistics.median(communicating)


def launch_ns(clock: Clock, call: Callable[[], Any], launches: int = 1, rounds: int = 5) -> float:
    """Return the host time in ns of one launch, for a call that makes `launches` of them."""
    call()
    clock.sync()
    samples = []
    calls = max(1, _MOST_CALLS // launches)
    for _ in range(rounds):
        clock.hold(1e-3)
        began = time.perf_counter()
        for _ in range(calls):
            call()
        samples.append((time.perf_counter() - began) / (calls * launches) * 1e9)
        clock.sync()
    return statistics.median(samples)


def wait_all(works: Sequence[dist.Work]) -> None:
    """Block until all of `works` are done."""
    for work in works:
        work.wait()
