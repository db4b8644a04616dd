"""Runs kernels in their tilings and times them.

Each runs alone, on made-up memory that is larger than the device's cache, so that it finds as little in it as after
the kernels before it in a step.
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

_TOGETHER = 4  # kernels whose tilings are compiled in one go, enough for 16 workers
_FINALISTS = 3
_ROUNDS = 3


def measure(
    trials: Sequence[Trial],
    known: Mapping[str, Mapping[str, float]],
    graph: LoweredGraph,
    cache_dir: Path,
    seconds: float,
) -> dict[str, dict[str, float]]:
    """ns by kernel and tiling of `trials`, in their order, as many as there is time for; `known` is what is there."""
    until = time.monotonic() + seconds
    found: dict[str, dict[str, float]] = {}
    with _disable_current_modes(), torch.no_grad():  # a compiler runs among fake tensors
        for at in range(0, len(trials), _TOGETHER):
            if time.monotonic() > until:
                count("kernels_not_tuned_for_want_of_time", len(trials) - at)
                break
            together = trials[at : at + _TOGETHER]
            times = {each.name: dict(known[each.name]) for each in together}
            found |= _searched(together, times, graph, cache_dir, until)
    if any(each.op.device.type == "cuda" for each in trials):
        torch.cuda.empty_cache()  # what kernels ran on is for the job, and for those who allocate without torch
    return found


def _searched(
    trials: Sequence[Trial], times: dict[str, dict[str, float]], graph: LoweredGraph, cache_dir: Path, until: float
) -> dict[str, dict[str, float]]:
    """`times` with all that the search for the fastest tilings of `trials` met until that moment."""
    generator = generator_for(trials[0].op.device.type)
    open_ones = list(trials)
    while True:
        missing = {each.name: explore(each, times[each.name]).missing for each in open_ones}
        open_ones = [each for each in open_ones if missing[each.name]]
        if not open_ones:
            return times
        launchers = _loaded(generator, itertools.chain.from_iterable(missing.values()), cache_dir)
        for each in list(open_ones):
            new = _times(each, missing[each.name], launchers, graph)
            times[each.name].update(new)
            if not new:
                open_ones.remove(each)
        if time.monotonic() > until:
            return times


def _loaded(generator: Generator, sources: Iterable[KernelSource], cache_dir: Path) -> dict[str, Launcher]:
    """Launchers by name, without those that the toolchain refuses (a tile that needs too much shared memory)."""
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
    """ns of each of `sources`; nothing where the memory to try them is not there."""
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
            for _ in range(_ROUNDS):  # taking turns, as clocks and temperatures drift
                for name in dict.fromkeys((*names[:1], *best)):  # the first is what others are compared with
                    samples[name].append(compute_ns(clock, calls[name], rounds=1))
    except torch.OutOfMemoryError:
        return {}
    count("tilings_timed", len(names))
    refused = {source.name: NEVER for source in sources if source.name not in launchers}
    return {name: statistics.median(times) for name, times in samples.items()} | refused


def _call(launcher: Launcher, sets: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]) -> Callable[[], None]:
    """A launch on the next of `sets`, each time."""
    turn = itertools.cycle(sets)
    return lambda: launcher(*next(turn), *sizes)
