"""Chooses the kernels and tilings to measure: first tilings near the heuristic one, then near the fastest."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from overlapc.codegen.generators import Alternative, KernelSource
from overlapc.codegen.sources import Sources, alternatives_of
from overlapc.codegen.trial import refuse
from overlapc.ir.ops import Combo, Loops, LoweredGraph, loops_of
from overlapc.schedule.model import Estimate, Node, Schedule

NEVER = 1e18  # ns of a tiling that the toolchain rejects: finite, because ranks agree on medians
_STEPS = 3  # how often the search may move to a faster tiling
_STEP_GAIN = 0.99  # the search stops unless a step takes less than this share of the time before it
_LEAST_SHARE = 1e-3  # of the time of all kernels: cheaper kernels are not measured


@dataclass(frozen=True)
class Trial:
    """A kernel of the graph to measure in several tilings."""

    op: Loops | Combo
    first: tuple[Alternative, ...]  # the heuristic tiling, then its neighbours
    nodes: tuple[str, ...]  # schedule nodes that launch the kernel
    around: Callable[[Alternative], tuple[Alternative, ...]]  # the neighbours of a tiling

    @property
    def heuristic(self) -> KernelSource:
        """The source in the heuristic tiling, used without measurements."""
        return self.first[0].source

    @property
    def name(self) -> str:
        return self.heuristic.name


@dataclass(frozen=True)
class Explored:
    """The state of a search: the tilings that it has reached, and those of them that must be measured next."""

    reached: Mapping[str, KernelSource]  # by name
    missing: tuple[KernelSource, ...]


def trials_of(
    schedule: Schedule, graph: LoweredGraph, weigh: Callable[[Node], Estimate | None]
) -> tuple[int, list[Trial]]:
    """Return (number of different kernels, those worth measuring, most expensive first). `weigh` estimates a node."""
    first: dict[str, Loops | Combo] = {}
    nodes: dict[str, list[str]] = {}
    weights_ns: dict[str, float] = {}
    sources = Sources(graph)
    for node in schedule.nodes:
        op = node.payload
        if isinstance(op, Loops | Combo):
            estimate = weigh(node)
            name = sources.of(op).name
            first.setdefault(name, op)
            nodes.setdefault(name, []).append(node.name)
            weights_ns[name] = weights_ns.get(name, 0.0) + (0.0 if estimate is None else estimate.ns)
    least_ns = _LEAST_SHARE * sum(weights_ns.values())
    found = []
    for name in sorted(first, key=lambda name: (-weights_ns[name], name)):
        if weights_ns[name] >= least_ns and all(refuse(part.body) is None for part in loops_of(first[name])):
            trial = trial_of(first[name], graph, tuple(nodes[name]))
            if len(trial.first) > 1:
                found.append(trial)
    return len(first), found


def trial_of(op: Loops | Combo, graph: LoweredGraph, nodes: tuple[str, ...]) -> Trial:
    """Return the trial of the kernel of `op`, which `nodes` launch."""

    @functools.cache  # `explore` is called several times for one trial
    def around(alternative: Alternative) -> tuple[Alternative, ...]:
        return tuple(alternatives_of(op, graph, alternative.tiling))

    return Trial(op, tuple(alternatives_of(op, graph)), nodes, around)


def explore(trial: Trial, times: Mapping[str, float]) -> Explored:
    """Search from the heuristic tiling, at each step adding the neighbours of the fastest one by `times`.

    times: ns by name of the source. The result depends only on `times`, so ranks with equal times agree.
    """
    reached = {alternative.source.name: alternative for alternative in trial.first}
    fastest_ns = times.get(trial.name, math.inf)
    for step in itertools.count():
        missing = tuple(alternative.source for name, alternative in reached.items() if name not in times)
        fastest = min(reached, key=lambda name: (times.get(name, math.inf), name))
        if missing or step == _STEPS or times[fastest] >= _STEP_GAIN * fastest_ns:
            break
        fastest_ns = times[fastest]
        reached.update(
            (alternative.source.name, alternative)
            for alternative in trial.around(reached[fastest])
            if alternative.source.name not in reached
        )
    return Explored({name: alternative.source for name, alternative in reached.items()}, missing)
