"""Measures how load changes a device's clock: the slowdown of work at full load, and the clock at lower utilization.

A GPU at its power limit lowers its clock. `throttle` is the slowdown of matmuls and attention when only matmuls run.
In a training step the clock is higher, by an amount that depends on the fraction of the time in which the device
computes (`clock_by_utilization`); this is measured with the work of a transformer layer, with pauses between layers. On
H200s a single clock explains the time of all work: each matmul or attention is slowed by the ratio of a clock of its
own to the device's clock, if that is above 1. Collectives draw power, too: in the pauses between layers they lower the
clock as a certain amount of additional compute would (`collective_load`).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch

from overlapc.estimators.calibration.clock import Clock, Launch, burst_ns, collective_ns, compute_ns
from overlapc.estimators.calibration.effort import AttentionShape, Effort
from overlapc.estimators.calibration.workloads import (
    agreed,
    all_agreed,
    attend,
    attention_inputs,
    calls_for,
    operands,
    random,
)
from overlapc.estimators.device import rate_at

_SAMPLED = 100  # rounds of a layer, about half a second on an H200
_SETTLING = 4  # times `Effort.load_s`: an H200's clock oscillates for about a second

Call = Callable[[], object]
Curve = list[list[float]]


@dataclass(frozen=True)
class TimedWork:
    """A call with its FLOPs. kind: "matmul", "attention", or "memory" for work that does not depend on the clock."""

    kind: str
    flops: int
    call: Call


@dataclass(frozen=True)
class LoadMeasurement:
    """Measures the clock under load. `full` launches work of full load, which lowers the clock most."""

    effort: Effort
    device: torch.device
    clock: Clock
    full: Callable[[], None]
    say: Callable[[str], None]

    def measured(self) -> dict[str, dict[str, Curve] | Curve]:
        """Return `throttle` and `clock_by_utilization` of a profile."""
        with torch.no_grad():
            self.say("matmuls and attention in bursts and under load")
            throttle = self._throttle()
            self.say("a layer with pauses")
            return {"throttle": throttle, "clock_by_utilization": self._clock_by_utilization(throttle)}

    def _throttle(self) -> dict[str, Curve]:
        """Return, by kind, (FLOPs, time under full load relative to a short burst)."""
        works = [self._matmul(shape) for shape in self.effort.burst_matmuls]
        for case in self.effort.attention.get("bf16", ()):
            works.append(TimedWork("attention", case.flops, self._attend(case)))
        cool_ns = [burst_ns(self.clock, work.call) for work in works]
        for _ in range(_SETTLING):
            self.full()
        hot_ns = [compute_ns(self.clock, work.call, rounds=1, ahead=self.full) for work in works]
        throttle: dict[str, Curve] = {}
        for work, cool, hot in zip(works, cool_ns, hot_ns, strict=True):
            throttle.setdefault(work.kind, []).append([work.flops, max(1.0, hot / cool)])
        return {kind: sorted(points) for kind, points in throttle.items()}

    def _clock_by_utilization(self, throttle: Mapping[str, Curve]) -> Curve:
        """Return (thousandths of the time that the device computes, clock at full load relative to the clock then)."""
        works = self._layer()
        bursts = self._bursts(works, throttle)
        alone_ns = sum(ns for ns, _ in bursts)
        found = []
        for idle in self.effort.pause_fractions:
            busy_ns, period_ns = self._settled(works, alone_ns, idle * alone_ns)
            found.append([1000.0 * busy_ns / period_ns, clock_ratio_of(bursts, busy_ns)])
        return sorted(found)

    def collective_load(
        self, throttle: Mapping[str, Curve], clock_by_utilization: Curve, launches: Sequence[Launch]
    ) -> float:
        """Return the power of collectives relative to that of compute. All ranks must call this together.

        throttle, clock_by_utilization: results of `measured` on this rank.
        launches: the collectives that run in the pauses between layers.
        """
        with torch.no_grad():
            works = self._layer()
            bursts = self._bursts(works, throttle)
            work_ns = agreed(sum(ns for ns, _ in bursts), self.device)  # determines the number of rounds
            alone = [
                collective_ns(self.clock, launch, calls_for(self.effort.pause_collective_bytes, self.clock))
                for launch in launches
            ]
            pause_ns = sum(all_agreed(alone, self.device))

            def communicate() -> None:
                for launch in launches:
                    launch().wait()

            drawn = []  # utilization at the present clock minus the actual one, without and with collectives
            for pause in (None, communicate):  # the deviation without collectives is subtracted below
                busy_ns, period_ns = self._settled(works, work_ns, pause_ns, pause)
                drawn.append(
                    utilization_at(clock_by_utilization, clock_ratio_of(bursts, busy_ns)) - busy_ns / period_ns
                )
            return min(1.0, max(0.0, (drawn[1] - drawn[0]) * period_ns / pause_ns))

    def _bursts(self, works: Sequence[TimedWork], throttle: Mapping[str, Curve]) -> list[tuple[float, float]]:
        """Return, for each of `works`, its ns in a short burst and its time at full load relative to that."""
        bursts = []
        for work in works:
            points = [(int(flops), times) for flops, times in throttle.get(work.kind, ())]
            bursts.append((burst_ns(self.clock, work.call), rate_at(points, work.flops) if points else 1.0))
        return bursts

    def _settled(
        self, works: Sequence[TimedWork], work_ns: float, pause_ns: float, pause: Callable[[], None] | None = None
    ) -> tuple[float, float]:
        """Return the ns of one round of `works`, and of a round with the pause after it, once the clock has settled.

        pause: launches work that takes `pause_ns`; None: the device is idle for that time.
        """
        rounds = math.ceil(_SETTLING * self.effort.load_s * 1e9 / (work_ns + pause_ns)) + _SAMPLED
        begins, ends = [], []
        for at in range(rounds):
            sampled = at >= rounds - _SAMPLED
            if sampled:
                begins.append(self.clock.mark())
            _run(works)
            if sampled:
                ends.append(self.clock.mark())
            if pause is not None:
                pause()
            elif pause_ns > 0:
                self.clock.idle(pause_ns / 1e9)
        last = self.clock.mark()
        self.clock.sync()
        between = self.clock.between_ns
        busy_ns = median(between(begin, end) for begin, end in zip(begins, ends, strict=True))
        return busy_ns, median(between(begin, after) for begin, after in zip(begins, [*begins[1:], last], strict=True))

    def _layer(self) -> list[TimedWork]:
        """Return the forward of a transformer layer: matmuls, attention, and a copy for all memory-bound kernels."""
        works = [self._matmul(shape) for shape in self.effort.layer_matmuls]
        if self.effort.beside_attention is not None:
            case = self.effort.beside_attention
            works.insert(len(works) // 2, TimedWork("attention", case.flops, self._attend(case)))
        source = random(self.device, self.effort.copy_bytes // 8, dtype=torch.float32)
        return [*works, TimedWork("memory", 0, partial(torch.empty_like(source).copy_, source))]

    def _matmul(self, shape: tuple[int, int, int]) -> TimedWork:
        return TimedWork(
            "matmul", 2 * math.prod(shape), partial(torch.mm, *operands(self.device, shape, torch.bfloat16))
        )

    def _attend(self, case: AttentionShape) -> Call:
        return partial(attend, *attention_inputs(self.device, case, torch.bfloat16))


def clock_ratio_of(bursts: Sequence[tuple[float, float]], taken_ns: float) -> float:
    """Return the ratio of the clock under full load to the clock at which the calls take `taken_ns` together.

    bursts: the ns of each call at the highest clock, and its time at full load relative to that. The result is between
    the ratio for the highest clock and 1.
    """
    low, high = 1.0 / max(times for _, times in bursts), 1.0
    while high - low > 1e-4:  # bisection: the time increases with the ratio
        middle = (low + high) / 2
        if sum(ns * max(1.0, times * middle) for ns, times in bursts) < taken_ns:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def utilization_at(clock_by_utilization: Curve, value: float) -> float:
    """Return the utilization (0 to 1) at which `clock_by_utilization` has `value`, by linear interpolation."""
    shares, values = zip(*clock_by_utilization, strict=True)
    at = bisect_left(values, value)
    if at == 0 or at == len(values):
        return float(shares[min(at, len(values) - 1)]) / 1000
    part = (value - values[at - 1]) / (values[at] - values[at - 1])
    return float(shares[at - 1] + part * (shares[at] - shares[at - 1])) / 1000


def _run(works: Sequence[TimedWork]) -> None:
    for work in works:
        work.call()
