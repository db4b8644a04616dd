"""Block sizes by measurement (`autotune`): each kernel of a graph in a few tilings, timed here, kept on disk.

    tuning = tune(schedule, graph, weigh, cache_dir, seconds=60, talks=talks)
    sources = generate_kernels(schedule, graph, tuning.sources)      # the fastest of each
    tuning.estimate(node)                                            # and what it took

Kernels that take most of a graph come first; equal ones are measured once, in all graphs and processes of a host, as
times are kept by the text of a kernel, the device and the versions of what compiles it. A time is taken on made-up
memory that is larger than the device's cache, so that kernels find as little in it as after the kernels before them
in a step.

Ranks divide the kernels, tell each other the times and decide by the same medians: all of them run the same kernels,
so that what they compute alike stays alike, and none waits for another for longer than `seconds` and a compilation.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from overlapc.codegen.kernel import Generator, KernelSource, Launcher, generator_for
from overlapc.codegen.sources import alternatives_of, source_of
from overlapc.codegen.trial import memory_sets, refuse
from overlapc.errors import ToolchainError
from overlapc.estimators.agreement import Compilation
from overlapc.estimators.clock import cache_bytes, clock_for, compute_ns
from overlapc.estimators.measured import machine_of
from overlapc.ir.ops import Combo, Loops, LoweredGraph, loops_of
from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.counters import count
from overlapc.schedule.model import Estimate, Node, Schedule

_GAIN = 0.97  # of the heuristic tiling's time: what another must stay under, as one time is 1 to 2% off the next
_LEAST_SHARE = 1e-3  # of all kernels' time: cheaper ones are left as they are
_TOGETHER = 4  # kernels whose tilings are compiled in one go, enough for 16 workers
_FINALISTS = 3
_ROUNDS = 3
_SUFFIX = ".tilings.json"


@dataclass(frozen=True)
class Trial:
    """A kernel of the graph, in the tiling that would be used and in others, and which nodes it is launched for."""

    op: Loops | Combo
    sources: tuple[KernelSource, ...]  # the heuristic one first
    nodes: tuple[str, ...]
    weight_ns: float  # what all its launches are estimated to take
    key: str  # in the cache

    @property
    def name(self) -> str:
        return self.sources[0].name


@dataclass(frozen=True)
class Choice:
    """What was measured of one kernel."""

    source: KernelSource  # the one to use
    chosen_ns: float
    heuristic_ns: float
    nodes: tuple[str, ...]

    @property
    def tiling(self) -> str:
        """As the head of its source says it: `looped: x 4096 by 1, r 4096 by 2048, 8 warps`."""
        return self.source.text.splitlines()[0].removeprefix("# ")

    def __str__(self) -> str:
        return f"{self.heuristic_ns / 1e3:.1f} us -> {self.chosen_ns / 1e3:.1f} us ({self.tiling})"


@dataclass(frozen=True)
class Tuning:
    """The kernels of a graph that were measured, by the name of the heuristic source; an estimator of their nodes."""

    choices: Mapping[str, Choice]
    kernels: int  # different ones in the graph
    name: str = "tuned here"
    _ns: Mapping[str, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        times = {node: choice.chosen_ns for choice in self.choices.values() for node in choice.nodes}
        object.__setattr__(self, "_ns", times)

    def estimate(self, node: Node) -> Estimate | None:
        """The time of the tiling that was chosen for it."""
        ns = self._ns.get(node.name)
        return None if ns is None else Estimate(ns, self.name)

    @property
    def sources(self) -> dict[str, KernelSource]:
        """What to use instead of the heuristic source of that name."""
        return {name: choice.source for name, choice in self.changed.items()}

    @property
    def changed(self) -> dict[str, Choice]:
        """Kernels for which another tiling was faster, the largest gain first."""
        gains = {name: (each.heuristic_ns - each.chosen_ns) * len(each.nodes) for name, each in self.choices.items()}
        order = sorted(gains, key=lambda name: -gains[name])
        return {name: self.choices[name] for name in order if self.choices[name].source.name != name}

    def summary(self) -> str:
        """`12 of 40 kernels measured, 3 changed: 3.21 ms -> 2.87 ms a run; most by …`."""
        before, after = (
            sum(getattr(each, which) * len(each.nodes) for each in self.choices.values()) / 1e6
            for which in ("heuristic_ns", "chosen_ns")
        )
        text = f"{len(self.choices)} of {self.kernels} kernels measured, {len(self.changed)} changed"
        if not self.changed:
            return text
        name, most = next(iter(self.changed.items()))
        return f"{text}: {before:.2f} ms -> {after:.2f} ms a run; most by {name}, {most}"

    def __str__(self) -> str:
        lines = (f"{name} x {len(each.nodes)}: {each}" for name, each in self.choices.items())
        return "\n".join([self.summary(), *lines])


def tune(
    schedule: Schedule,
    graph: LoweredGraph,
    weigh: Callable[[Node], Estimate | None],
    cache_dir: Path,
    *,
    seconds: float,
    talks: Compilation | None = None,
) -> Tuning:
    """The fastest of each kernel's tilings. `weigh` estimates a node; `seconds` bounds what is spent on measuring."""
    kernels, trials = _trials(schedule, graph, weigh)
    cache = KernelCache(cache_dir, "tilings")
    known = {trial.name: times for trial in trials if (times := _kept(cache, trial)) is not None}
    own, ranks = (0, 1) if talks is None else talks.place
    missing = [each for at, each in enumerate(trials) if at % ranks == own and each.name not in known]
    with _disable_current_modes(), torch.no_grad():  # a compiler runs among fake tensors
        measured = _measured(missing, graph, cache_dir, seconds)
    known |= measured
    agreed = known
    if talks is not None:
        flat = {f"{each.key} {name}": ns for each in trials for name, ns in known.get(each.name, {}).items()}
        told = talks.agree_on_known(flat)
        agreed = {each.name: times for each in trials if (times := _told(each, told))}
    for each in trials:
        if each.name in agreed and (each.name in measured or each.name not in known):
            text = json.dumps(agreed[each.name])
            cache.get_or_build(each.key, _SUFFIX, functools.partial(_write, text))
    return Tuning({each.name: choose(each, agreed[each.name]) for each in trials if each.name in agreed}, kernels)


def _write(text: str, path: Path) -> None:
    path.write_text(text, encoding="utf-8")


def _told(trial: Trial, told: Mapping[str, float]) -> dict[str, float]:
    """Times of its tilings, if the heuristic one is among them."""
    times = {source.name: told.get(f"{trial.key} {source.name}") for source in trial.sources}
    found = {name: ns for name, ns in times.items() if ns is not None}
    return found if trial.name in found else {}


def choose(trial: Trial, times: Mapping[str, float]) -> Choice:
    """The fastest by `times`, in ns; the heuristic tiling unless another gains more than noise may."""
    by_name = {source.name: source for source in trial.sources}
    heuristic = times[trial.name]
    best = min(times, key=lambda name: (times[name], name))
    if times[best] >= _GAIN * heuristic:
        best = trial.name
    return Choice(by_name[best], times[best], heuristic, trial.nodes)


# --- which kernels


def _trials(
    schedule: Schedule, graph: LoweredGraph, weigh: Callable[[Node], Estimate | None]
) -> tuple[int, list[Trial]]:
    """(different kernels, those worth measuring with the heaviest first)."""
    first: dict[str, Loops | Combo] = {}
    nodes: dict[str, list[str]] = {}
    weights: dict[str, float] = {}
    for node in schedule.nodes:
        op = node.payload
        if isinstance(op, Loops | Combo):
            estimate = weigh(node)
            name = source_of(op, graph).name
            first.setdefault(name, op)
            nodes.setdefault(name, []).append(node.name)
            weights[name] = weights.get(name, 0.0) + (0.0 if estimate is None else estimate.ns)
    least = _LEAST_SHARE * sum(weights.values())
    found = []
    for name in sorted(first, key=lambda name: (-weights[name], name)):
        if weights[name] < least or any(refuse(part.body) is not None for part in loops_of(first[name])):
            continue
        sources = tuple(alternatives_of(first[name], graph))
        if len(sources) > 1:
            key = _key(sources, first[name], graph)
            found.append(Trial(first[name], sources, tuple(nodes[name]), weights[name], key))
    return len(first), found


@functools.lru_cache(None)
def _prelude() -> bytes:
    """What every Triton kernel calls: its text is part of none of them."""
    return Path(__file__).with_name("runtime").joinpath("triton_prelude.py").read_bytes()


def _key(sources: Sequence[KernelSource], op: Loops | Combo, graph: LoweredGraph) -> str:
    sizes = [f"{symbol}={graph.hint(symbol)}" for symbol in sources[0].sizes]
    names = [source.name for source in sources]
    return content_key(machine_of(op.device), _triton_version(), _prelude(), *names, *sizes)


@functools.lru_cache(None)
def _triton_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""


def _kept(cache: KernelCache, trial: Trial) -> dict[str, float] | None:
    """What an earlier process measured; an entry that is not such a thing is dropped."""
    text = cache.read(trial.key, _SUFFIX)
    if text is None:
        return None
    try:
        found = {str(name): float(ns) for name, ns in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError):
        found = {}
    if trial.name in found and all(math.isfinite(ns) and ns > 0 for ns in found.values()):
        return found
    cache.drop(trial.key, _SUFFIX)
    return None


# --- measuring


def _measured(
    trials: Sequence[Trial], graph: LoweredGraph, cache_dir: Path, seconds: float
) -> dict[str, dict[str, float]]:
    """Times by kernel and tiling, as many as there is time for."""
    began = time.monotonic()
    found: dict[str, dict[str, float]] = {}
    for at in range(0, len(trials), _TOGETHER):
        together = trials[at : at + _TOGETHER]
        if time.monotonic() - began > seconds:
            count("kernels_not_tuned_for_want_of_time", len(trials) - at)
            break
        generator = generator_for(together[0].op.device.type)
        launchers = _loaded(generator, [source for each in together for source in each.sources], cache_dir)
        for each in together:
            if each.name in launchers:
                times = _times(each, launchers, graph)
                if times:
                    found[each.name] = times
    return found


def _loaded(generator: Generator, sources: Sequence[KernelSource], cache_dir: Path) -> dict[str, Launcher]:
    """Launchers by name, without those that the toolchain refuses (a tile that needs too much shared memory)."""
    try:
        return dict(generator.load(sources, cache_dir))
    except ToolchainError:
        found: dict[str, Launcher] = {}
        for source in sources:
            try:
                found.update(generator.load([source], cache_dir))
            except ToolchainError:
                count("tilings_refused")
        return found


def _times(trial: Trial, launchers: Mapping[str, Launcher], graph: LoweredGraph) -> dict[str, float]:
    """ns of each tiling that was loaded; nothing where the memory to try them is not there."""
    device = trial.op.device
    clock = clock_for(device)
    names = [source.name for source in trial.sources if source.name in launchers]
    sizes = [graph.hint(symbol) for symbol in trial.sources[0].sizes]
    try:
        span_bytes = 2 * cache_bytes(device)
        sets = memory_sets(trial.sources[0].buffers, graph, device, span_bytes)
        calls = {name: _call(launchers[name], sets, sizes) for name in names}
        samples = {name: [compute_ns(clock, call, rounds=1)] for name, call in calls.items()}
        best = sorted(names, key=lambda name: samples[name][0])[:_FINALISTS]
        for _ in range(_ROUNDS):  # taking turns, as clocks and temperatures drift
            for name in dict.fromkeys((trial.name, *best)):
                samples[name].append(compute_ns(clock, calls[name], rounds=1))
    except torch.OutOfMemoryError:
        return {}
    count("tilings_timed", len(names))
    return {name: statistics.median(times) for name, times in samples.items()}


def _call(launcher: Launcher, sets: Sequence[Sequence[torch.Tensor]], sizes: Sequence[int]) -> Callable[[], None]:
    """A launch on the next of `sets`, each time."""
    turn = itertools.cycle(sets)
    return lambda: launcher(*next(turn), *sizes)
