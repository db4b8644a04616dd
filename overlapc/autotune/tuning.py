"""Chooses the fastest tiling of each kernel, the same on all ranks.

The most expensive kernels are measured first. Equal kernels are measured once in all graphs and processes of a host,
because times are cached by the text of a kernel, the device and the versions of its compilers.

Ranks divide the kernels that all of them have, exchange the times and decide by the same ones, so that they run the
same kernels and replicated results stay bitwise equal. A kernel that only one rank has is measured by that rank. No
rank waits for another for longer than `seconds` and a compilation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from overlapc.agreement.rank_agreement import GraphAgreement
from overlapc.autotune.cached_times import CachedTimes
from overlapc.autotune.search import Trial, explore, trials_of
from overlapc.autotune.timing import measure
from overlapc.codegen.generators import KernelSource
from overlapc.ir.ops import LoweredGraph
from overlapc.schedule.model import Estimate, Node, Schedule

_GAIN = 0.97  # of the heuristic tiling's time: another must take less, because times vary by 1 to 2% between runs


@dataclass(frozen=True)
class Choice:
    """The measurements of one kernel."""

    source: KernelSource  # the chosen one
    chosen_ns: float
    heuristic_ns: float
    nodes: tuple[str, ...]

    @property
    def tiling(self) -> str:
        """The tiling, as the first line of the source: `looped: x 4096 by 1, r 4096 by 2048, 8 warps`."""
        return self.source.text.splitlines()[0].removeprefix("# ")

    def __str__(self) -> str:
        return f"{self.heuristic_ns / 1e3:.1f} us -> {self.chosen_ns / 1e3:.1f} us ({self.tiling})"


@dataclass(frozen=True)
class Tuning:
    """The measured kernels of a graph, by the name of their heuristic source; an estimator of their nodes."""

    choices: Mapping[str, Choice]
    kernels: int  # different ones in the graph
    name: str = "tuned here"
    _ns: Mapping[str, float] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        times = {node: choice.chosen_ns for choice in self.choices.values() for node in choice.nodes}
        object.__setattr__(self, "_ns", times)

    def estimate(self, node: Node) -> Estimate | None:
        """Return the measured time of the tiling chosen for the node's kernel; None if it was not measured."""
        ns = self._ns.get(node.name)
        return None if ns is None else Estimate(ns, self.name)

    @property
    def sources(self) -> dict[str, KernelSource]:
        """The name of a heuristic source -> the source to use instead."""
        return {name: choice.source for name, choice in self.changed.items()}

    @property
    def changed(self) -> dict[str, Choice]:
        """Kernels for which another tiling was faster, the largest gain first."""
        gains = {
            name: (choice.heuristic_ns - choice.chosen_ns) * len(choice.nodes) for name, choice in self.choices.items()
        }
        order = sorted(gains, key=lambda name: -gains[name])
        return {name: self.choices[name] for name in order if self.choices[name].source.name != name}

    def summary(self) -> str:
        """Return `12 of 40 kernels measured, 3 changed: 3.21 ms -> 2.87 ms per run; largest gain: …`."""
        before, after = (
            sum(getattr(choice, which) * len(choice.nodes) for choice in self.choices.values()) / 1e6
            for which in ("heuristic_ns", "chosen_ns")
        )
        text = f"{len(self.choices)} of {self.kernels} kernels measured, {len(self.changed)} changed"
        if not self.changed:
            return text
        name, most = next(iter(self.changed.items()))
        return f"{text}: {before:.2f} ms -> {after:.2f} ms per run; largest gain: {name}, {most}"

    def __str__(self) -> str:
        lines = (f"{name} x {len(choice.nodes)}: {choice}" for name, choice in self.choices.items())
        return "\n".join([self.summary(), *lines])


def tune(
    schedule: Schedule,
    graph: LoweredGraph,
    weigh: Callable[[Node], Estimate | None],
    cache_dir: Path,
    *,
    seconds: float,
    agreement: GraphAgreement | None = None,
) -> Tuning:
    """Measure the kernels of `schedule` for at most `seconds`. `weigh` estimates a node."""
    kernels, trials = trials_of(schedule, graph, weigh)
    cached = CachedTimes(cache_dir, graph)
    known = {trial.name: cached.read(trial) for trial in trials}
    common = trials if agreement is None else _on_all_ranks(agreement, cached, trials)
    own, ranks = (0, 1) if agreement is None else agreement.index_and_count
    left_to_others = {trial.name for at, trial in enumerate(common) if at % ranks != own}
    share = [
        trial for trial in trials if trial.name not in left_to_others and explore(trial, known[trial.name]).missing
    ]
    agreed: dict[str, Mapping[str, float]] = {**known, **measure(share, known, graph, cache_dir, seconds)}
    if agreement is not None:
        agreed |= _shared_times(agreement, cached, common, agreed)
    for trial in trials:
        if agreed[trial.name] != known[trial.name]:
            cached.write(trial, agreed[trial.name])
    choices = {trial.name: choose(trial, agreed[trial.name]) for trial in trials if trial.name in agreed[trial.name]}
    return Tuning(choices, kernels)


def choose(trial: Trial, times: Mapping[str, float]) -> Choice:
    """Choose the fastest tiling by `times`, in ns; the heuristic one unless the gain exceeds measurement noise."""
    reached = explore(trial, times).reached
    heuristic = times[trial.name]
    best = min((name for name in reached if name in times), key=lambda name: (times[name], name))
    if times[best] >= _GAIN * heuristic:
        best = trial.name
    return Choice(reached[best], times[best], heuristic, trial.nodes)


def _on_all_ranks(agreement: GraphAgreement, cached: CachedTimes, trials: list[Trial]) -> list[Trial]:
    """Return the kernels that all ranks have, in the same order on all of them.

    Not all kernels are common: a sum after an exchange contains this rank's number, and keys contain the device.
    """
    keys_of_ranks = agreement.exchange("kernels to measure", "\n".join(map(cached.key, trials)))
    common = set.intersection(*(set(keys.split()) for keys in keys_of_ranks))
    return [trial for trial in trials if cached.key(trial) in common]


def _shared_times(
    agreement: GraphAgreement, cached: CachedTimes, trials: list[Trial], times: Mapping[str, Mapping[str, float]]
) -> dict[str, Mapping[str, float]]:
    """Return the agreed times of the kernels that all ranks have."""
    known = {cached.key(trial): times[trial.name] for trial in trials if times[trial.name]}
    tables = agreement.agree_on_tables(known)
    return {trial.name: tables.get(cached.key(trial), {}) for trial in trials}
