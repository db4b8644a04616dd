"""Measures contention between compute and collectives of all ranks, on every rank at the same time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from overlapc.errors import CalibrationError
from overlapc.estimators.calibration.clock import Clock, Launch, beside_ns, cache_bytes, collective_ns, compute_ns
from overlapc.estimators.calibration.effort import Effort
from overlapc.estimators.calibration.profiled_contention import held_multiprocessors, measured_contention, piece_ns
from overlapc.estimators.calibration.workloads import (
    DTYPES,
    agreed,
    all_agreed,
    attend,
    attention_inputs,
    calls_for,
    launcher,
    operands,
    random,
    world_on,
)
from overlapc.estimators.contention import tiles_of, waves

Times = Mapping[str, tuple[float, float]]  # call -> slowdown factor of the call and of the collective beside it


@dataclass(frozen=True)
class ContentionMeasurement:
    """Measures `quantities` of a profile, and the `facts` that they come from."""

    effort: Effort
    device: torch.device
    clock: Clock
    load: Callable[[], None] | None  # launches work that runs before measured compute
    say: Callable[[str], None]
    quantities: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)

    def measure(self) -> None:
        """Measure with the profiler's kernel times on a GPU, else with the clock."""
        if self.clock.queued:
            self.by_kernel()
        else:
            self.by_clock()

    def by_kernel(self) -> None:
        """Measure on the default number of channels, and on fewer; see profiled_contention.py."""
        slowdowns: dict[str, dict[str, Any]] = {}
        ordinary: dict[str, tuple[float, Times]] = {}  # on default channels: ns alone, slowdowns
        size, multiprocessors = self.effort.beside_bytes, self._multiprocessors()
        for channels in (0, *self.effort.channels):
            group = world_on(channels)
            for collective, dtype in (("all_gather", "bf16"), ("reduce_scatter", "fp32")):
                launch = launcher(collective, group, size, DTYPES[dtype], self.device)
                alone_ns = agreed(collective_ns(self.clock, launch, calls_for(size, self.clock)), self.device)
                self.say(f"{collective} beside compute, {channels or 'default'} channels")
                times = self._measured(launch, alone_ns)
                found = slowdown_of(self.effort, multiprocessors, times)
                if channels:
                    slowdowns[f"{collective}@{channels}"] = {**found, "alone": alone_ns / ordinary[collective][0]}
                else:
                    ordinary[collective], slowdowns[collective] = (alone_ns, times), found
        slowdowns["other"] = slowdown_of(
            self.effort, multiprocessors, mean_of([times for _, times in ordinary.values()])
        )
        self.quantities["slowdowns"] = slowdowns
        self.quantities["collective_slowdown"] = slowdowns["other"]["own_matmul"]
        self.quantities["multiprocessors"] = multiprocessors

    def of_copies(self, launch: Launch, alone_ns: float) -> dict[str, Any]:
        """Return the `Slowdown` of a collective by copies and compute on a GPU. Copies occupy no multiprocessors."""
        times = self._measured(launch, alone_ns, piece_ns(launch))
        return {**slowdown_of(self.effort, self._multiprocessors(), times), "multiprocessors": 1.0}

    def _multiprocessors(self) -> int:
        return int(torch.cuda.get_device_properties(self.device).multi_processor_count)

    def _measured(self, launch: Launch, alone_ns: float, copy_ns: float | None = None) -> Times:
        """Return the slowdown factors by call, without calls that the collective never overlapped for their whole time.

        copy_ns: time of each copy of the collective, alone; None for a collective that is a kernel.
        """
        effort = self.effort
        calls: dict[str, Callable[[], object]] = {}
        for rows, inner, columns in effort.beside_matmuls:
            calls[f"matmul {rows, inner, columns}"] = partial(
                torch.mm, *operands(self.device, (rows, inner, columns), torch.bfloat16)
            )
            grad, x = (random(self.device, inner, size, dtype=torch.bfloat16) for size in (rows, columns))
            calls[f"gradient {rows, inner, columns}"] = partial(torch.mm, grad.t(), x)
        for size in effort.beside_moved:
            calls[f"memory {size}"] = self._streaming(size)
        if effort.beside_attention is not None:
            inputs = attention_inputs(self.device, effort.beside_attention, torch.bfloat16)
            calls["attention"] = partial(attend, *inputs)
        with torch.no_grad():
            own_ns = [compute_ns(self.clock, call, rounds=1) for call in calls.values()]
            calls_ns = dict(zip(calls, all_agreed(own_ns, self.device), strict=True))
            contention = measured_contention(calls, calls_ns, launch, alone_ns, self.load, copy_ns)
        for name, each in contention.items():
            self.facts[f"{name} beside a collective of {alone_ns / 1e3:.0f} us"] = each.compute or 0.0
        # All ranks leave out the same calls.
        missing = all_agreed([each.compute is None for each in contention.values()], self.device)
        left_out = [name for name, absent in zip(contention, missing, strict=True) if absent]
        if left_out:
            self.say(f"  left out, because they were never overlapped for their whole time: {', '.join(left_out)}")
        return {
            name: (max(1.0, each.compute or 1.0), max(1.0, each.collective or 1.0))
            for name, each in contention.items()
            if name not in left_out
        }

    def _streaming(self, size_bytes: int) -> Callable[[], object]:
        """Return a call that reads and writes `size_bytes` of memory, not of the cache; generated kernels are measured
        in the same way."""
        sets = 2 + 2 * cache_bytes(self.device) // size_bytes
        sources = [random(self.device, size_bytes // 8, dtype=torch.float32) for _ in range(sets)]
        pairs = itertools.cycle([(source, torch.empty_like(source)) for source in sources])

        def add() -> object:
            source, target = next(pairs)
            return torch.add(source, 1.0, out=target)

        return add

    def by_clock(self) -> None:
        """Measure on a CPU, where collectives do not wait for a kernel's last wave."""
        effort, clock, device = self.effort, self.clock, self.device
        assert dist.group.WORLD is not None
        a, b = operands(device, effort.beside_matmul, torch.float32)
        product = torch.mm(a, b)
        source = random(device, effort.beside_bytes // 4, dtype=torch.float32)
        target = torch.empty_like(source)
        beside = {"matmul": lambda: torch.mm(a, b, out=product), "memory": lambda: torch.add(source, 1.0, out=target)}
        # gloo cannot tell when a reduce-scatter is done, so its all-gather represents all collectives.
        launch = launcher("all_gather", dist.group.WORLD, effort.beside_bytes, torch.float32, device)
        own_alone_ns = collective_ns(clock, launch, calls_for(effort.beside_bytes, clock))
        alone_ns = agreed(own_alone_ns, device)
        found: dict[str, float] = {}
        for kind, call in beside.items():
            self.say(f"all_gather beside {kind}")
            own_call_ns = compute_ns(clock, call)
            call_ns = agreed(own_call_ns, device)
            # The side that is measured must be overlapped for its whole duration, so the other has twice the work.
            slowed_ns, _ = beside_ns(clock, launch, 1, call, max(1, int(alone_ns / call_ns / 2.5)))
            found[kind] = max(1.0, slowed_ns / own_call_ns)
            _, slowed_ns = beside_ns(clock, launch, 1, call, max(1, math.ceil(2 * alone_ns / call_ns)))
            found[f"own_{kind}"] = max(1.0, slowed_ns / own_alone_ns)
        self.quantities["slowdowns"] = {"other": found}
        self.quantities["collective_slowdown"] = found["own_matmul"]


def slowdown_of(effort: Effort, multiprocessors: int, times: Times) -> dict[str, Any]:
    """Return a `Slowdown` as JSON. Raise CalibrationError if `times` has no matmul or no memory-bound kernel."""
    matmuls: dict[tuple[int, int, int], float] = {}
    stretched = []
    for shape in effort.beside_matmuls:
        both = [times[name] for name in (f"matmul {shape}", f"gradient {shape}") if name in times]
        if both:
            matmuls[shape] = statistics.mean(compute for compute, _ in both)
            stretched += [collective for _, collective in both]
    memories = [[size, *times[f"memory {size}"]] for size in effort.beside_moved if f"memory {size}" in times]
    if not matmuls or not memories:
        raise CalibrationError(
            "no matmul, or no memory-bound kernel, was overlapped for its whole time: ranks are out of step\n"
            "hint: stop other work on these GPUs, then calibrate again"
        )
    tiles = {shape: tiles_of(shape[0] * shape[2]) for shape in matmuls}
    _, largest, own_largest = memories[-1]
    return {
        "matmul": list(matmuls.values())[-1],
        "own_matmul": statistics.median(stretched),
        "matmuls": [[waves(tiles[shape], multiprocessors), slowed] for shape, slowed in matmuls.items()],
        "multiprocessors": float(
            held_multiprocessors([(tiles[shape], slowed) for shape, slowed in matmuls.items()], multiprocessors)
        ),
        "memory": largest,
        "own_memory": own_largest,
        "memories": [[size, slowed] for size, slowed, _ in memories],
        **({"attention": times["attention"][0]} if "attention" in times else {}),
    }


def mean_of(several: Sequence[Times]) -> Times:
    """Return the mean factors of the calls that are in all of `several`."""
    shared = [name for name in several[0] if all(name in times for times in several)]
    return {
        name: (
            statistics.mean(times[name][0] for times in several),
            statistics.mean(times[name][1] for times in several),
        )
        for name in shared
    }
