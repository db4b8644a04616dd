"""Compiles kernels in several tilings and times them.

Each kernel runs alone, on scratch memory that is larger than the device's cache, so that its data is as rarely cached
as after other kernels of a step.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.autotune.search import NEVER, Trial, explore
from overlapc.codegen.generators import Generator, KernelSource, Launcher, generator_for
from overlapc.codegen.trial import memory_sets
from overlapc.errors import ToolchainError
from overlapc.estimators.calibration.clock import cache_bytes, clock_for, compute_ns
from overlapc.ir.ops import LoweredGraph
from overlapc.runtime.counters import count

_TOGETHER = 4  # kernels whose tilings are compiled together, enough to occupy 16 workers
_FINALISTS = 3
_ROUNDS = 3


def measure(
    trials: Sequence[Trial],
    known: Mapping[str, Mapping[str, float]],
    graph: LoweredGraph,
    cache_dir: Path,
    seconds: float,
) -> dict[str, dict[str, float]]:
    """Return ns by kernel and tiling, with the `known` ones, for the first of `trials`, as many as `seconds` allow."""
    until = time.monotonic() + seconds
    found: dict[str, dict[str, float]] = {}
    with _disable_current_modes(), torch.no_grad():  # torch compiles under a fake tensor mode
        for at in range(0, len(trials), _TOGETHER):
            if time.monotonic() > until:
                count("kernels_not_tuned_for_want_of_time", len(trials) - at)
                break
            together = trials[at : at + _TOGETHER]
            times = {trial.name: dict(known[trial.name]) for trial in together}
            found |= _searched(together, times, graph, cache_dir, until)
    if any(trial.op.device.type == "cuda" for trial in trials):
        torch.cuda.empty_cache()  # returns the scratch memory, also to libraries that allocate without torch
    return found


def _searched(
    trials: Sequence[Trial], times: dict[str, dict[str, float]], graph: LoweredGraph, cache_dir: Path, until: float
) -> dict[str, dict[str, float]]:
    """Search for the fastest tilings of `trials` until that moment. Return `times` with all tilings measured."""
    generator = generator_for(trials[0].op.device.type)
    unfinished = list(trials)
    while True:
        missing = {trial.name: explore(trial, times[trial.name]).missing for trial in unfinished}
        unfinished = [trial for trial in unfinished if missing[trial.name]]
        if not unfinished:
            return times
        launchers = _loaded(generator, itertools.chain.from_iterable(missing.values()), cache_dir)
        for trial in list(unfinished):
            new = _times(trial, missing[trial.name], launchers, graph)
            times[trial.name].update(new)
            if not new:
                unfinished.remove(trial)
        if time.monotonic() > until:
            return times


def _loaded(generator: Generator, sources: Iterable[KernelSource], cache_dir: Path) -> dict[str, Launcher]:
    """Return launchers by name, without those that the toolchain rejects (a tile that needs too much shared memory)."""
    wanted = list(sources)
    try:
        return dict(generator.load(wanted, cache_dir))
    except ToolchainError:
        found: dict[str, Launcher] = {}
        for source in wanted:
            try:
                found.update(generator.load([source], cache_dir))
            except ToolchainError:
                count("tilings_refused")
        return found


def _times(
    trial: Trial, sources: Sequence[KernelSource], launchers: Mapping[str, Launcher], graph: LoweredGraph
) -> dict[str, float]:
    """Return the time of each of `sources` in ns; empty if there is not enough memory to run them."""
    device = trial.op.device
    sizes = [graph.hint(symbol) for symbol in trial.heuristic.sizes]
    names = [source.name for source in sources if source.name in launchers]
    try:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            clock = clock_for(device)
            sets = memory_sets(trial.heuristic.buffers, graph, device, span_bytes=2 * cache_bytes(device))
            calls = {name: _call(launchers[name], sets, sizes) for name in names}
            samples = {name: [compute_ns(clock, call, rounds=1)] for name, call in calls.items()}
            best = sorted(names, key=lambda name: samples[name][0])[:_FINALISTS]
            for _ in range(_ROUNDS):  # tilings take turns, because clocks and temperatures drift
                for name in dict.fromkeys((*names[:1], *best)):  # others are compared with the first one
                    samples[name].append(compute_ns(clock, calls[name], rounds=1))
    except torch.OutOfMemoryError:
        return {}
    count("tilings_timed", len(names))
    refused = {source.name: NEVER for source in sources if source.name not in launchers}
    return {name: statistics.median(times) for name, times in samples.items()} | refused


def _call(launcher: Launcher, sets: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]) -> Callable[[], None]:
    """Return a function that launches the kernel on the next of `sets` at each call."""
    turn = itertools.cycle(sets)
    return lambda: launcher(*next(turn), *sizes)
