"""Time calls, systems alternating: on a GPU with and without launches hidden, on a CPU the whole call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

CALLS = 10  # queued behind one held stream


@dataclass
class Times:
    """Seconds per call, one sample per round."""

    hidden: list[float] = field(default_factory=list)
    launched: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    waits: bool = False  # whether the call waits for the device, so that its launches are not hidden


class GpuClock:
    """Device time of calls queued behind a held stream."""

    def __init__(self) -> None:
        self.cycles = 2_000_000
        self.waiting: set[Callable[[], Any]] = set()  # calls in which the host waits for the device

    def queued(self, call: Callable[[], Any]) -> tuple[float, float]:
        """Return (device seconds per call, host seconds per call), the host never waiting for the device.

        If the call itself waits for the device, both times include its launches.
        """
        while True:
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            if call not in self.waiting:
                torch.cuda._sleep(self.cycles)
            start.record()
            began = time.perf_counter()
            for _ in range(CALLS):
                call()
            host = time.perf_counter() - began
            held = not start.query()
            end.record()
            torch.cuda.synchronize()
            if held or call in self.waiting:
                return start.elapsed_time(end) / CALLS / 1e3, host / CALLS
            if self.cycles > 5e8:
                self.waiting.add(call)
                self.cycles = 2_000_000
            else:
                self.cycles *= 2

    def launched(self, call: Callable[[], Any]) -> float:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / CALLS


def on_gpu(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Times]:
    clock = GpuClock()
    times = {system: Times() for system in calls}
    for number in range(rounds + 1):  # the first round is a warm-up and finds how long the stream must be held
        for system, call in calls.items():
            hidden, host = clock.queued(call)
            launched = clock.launched(call)
            if number:
                times[system].hidden.append(hidden)
                times[system].host.append(host)
                times[system].launched.append(launched)
    for system, call in calls.items():
        times[system].waits = call in clock.waiting
    return times


def on_cpu(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, Times]:
    """Time calls on the CPU; a sample is the mean of as many calls as take two milliseconds.

    With one thread, times are CPU time of that thread, which other work on the machine does not lengthen much.
    """
    now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    repeats: dict[str, int] = {}
    for system, call in calls.items():
        call()
        began = time.perf_counter()
        call()
        repeats[system] = max(1, round(2e-3 / max(time.perf_counter() - began, 1e-6)))
    times = {system: Times() for system in calls}
    for _ in range(rounds):
        for system, call in calls.items():
            began = now()
            for _ in range(repeats[system]):
                call()
            times[system].launched.append((now() - began) / repeats[system])
    for each in times.values():
        each.hidden = each.launched
    return times


def copy_bandwidth() -> float:
    """Return the rate of a device-to-device copy of 1 GiB in bytes per second, reads and writes counted."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    clock = GpuClock()
    seconds = [clock.queued(lambda: target.copy_(source))[0] for _ in range(7)]
    return 2 * source.nbytes / statistics.median(seconds)


def profiled(call: Callable[[], Any]) -> list[tuple[str, float]]:
    """Return (name, microseconds) of the device kernels of one call, longest first."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    totals: dict[str, float] = {}
    for event in recorded.profiler.kineto_results.events():
        if event.device_type() == torch.autograd.DeviceType.CUDA:
            totals[event.name()] = totals.get(event.name(), 0.0) + event.duration_ns() / 3e3
    return sorted(totals.items(), key=lambda item: -item[1])
