"""Measured nodes beside the prediction of a profile for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from overlapc.estimators.contention import ComputeKind, Contender, contender_of
from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.from_profile import from_profile
from overlapc.estimators.timeline import simulate
from overlapc.schedule.model import COMPUTE, Comm, Kind, Node, Schedule

KINDS = {Kind.START: "collectives", Kind.COMM: "collectives", Kind.KERNEL: "kernels", Kind.EXTERN: "library calls"}
APART = 0.02  # of a node's time: a shorter overlap counts as none, an overlap of all but that as overlapped throughout


@dataclass(frozen=True)
class Run:
    """A schedule as it ran: by node, ns and the share of them in which compute and communication ran at once."""

    schedule: Schedule
    measured_ns: Mapping[str, float]
    beside: Mapping[str, float]  # empty: not known


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A node as it ran and as a profile predicts it."""

    node: Node
    measured_ns: float
    alone_ns: float  # predicted with nothing beside it
    predicted_ns: float  # in the simulated step
    beside: float | None
    load: Contender | None  # of compute; of a collective: what most of the compute is that it runs beside
    overlapping: Comm | None  # of compute: the one collective that it is predicted to run beside all the time

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return KINDS[self.node.kind]

    @property
    def was_alone(self) -> bool:
        """Whether nothing ran beside it."""
        return self.beside is not None and self.beside <= APART

    @property
    def seen_alone_ns(self) -> float:
        """Its measured time without the predicted slowdown by nodes beside it."""
        return self.measured_ns if self.was_alone else self.measured_ns * self.alone_ns / self.predicted_ns

    @property
    def overlapped_throughout(self) -> bool:
        """Whether other work ran beside it for its whole duration."""
        return self.beside is not None and self.beside >= 1 - APART

    @property
    def off(self) -> float:
        """The error of the prediction: the absolute logarithm of measured over predicted time."""
        return abs(math.log(self.measured_ns / self.predicted_ns))


def estimated(schedule: Schedule, profile: DeviceProfile) -> Schedule:
    """A schedule with the profile's own estimates; nodes that it knows nothing about keep what they have."""
    chain = from_profile(profile)
    found = {node.name: chain.estimate(node) for node in schedule.nodes}
    return schedule.with_estimates({name: each for name, each in found.items() if each is not None})


def observe(profile: DeviceProfile, runs: Iterable[Run]) -> list[ObservedNode]:
    """Every node that was measured and that the profile predicts to take time, in the order of the schedules."""
    return [seen for run in runs for seen in _observe(profile, run)]


def _observe(profile: DeviceProfile, run: Run) -> list[ObservedNode]:
    timeline = simulate(estimated(run.schedule, profile), profile)
    nodes = timeline.schedule.nodes
    computing = [at for at, node in enumerate(nodes) if node.kind in COMPUTE]
    sending = sorted((at for at, node in enumerate(nodes) if node.comm is not None), key=timeline.start_ns.__getitem__)

    def overlaps(at: int, others: list[int], first: int) -> tuple[dict[int, float], int]:
        """Others -> how long each runs beside `at`, and the first that later nodes may still meet."""
        begin, end = timeline.start_ns[at], timeline.end_ns[at]
        while first < len(others) and timeline.end_ns[others[first]] <= begin:
            first += 1
        found = {}
        for other in others[first:]:
            if timeline.start_ns[other] >= end:
                break
            shared_ns = min(end, timeline.end_ns[other]) - max(begin, timeline.start_ns[other])
            if shared_ns > 0:
                found[other] = shared_ns
        return found, first

    seen: dict[int, ObservedNode] = {}
    for ours, others in ((computing, sending), (sending, computing)):
        first = 0
        for at in ours:
            node, span_ns = nodes[at], timeline.end_ns[at] - timeline.start_ns[at]
            beside, first = overlaps(at, others, first)
            measured_ns = run.measured_ns.get(node.name)
            if not measured_ns or node.estimate is None or node.estimate.ns <= 0 or span_ns <= 0:
                continue
            load, overlapping = _overlapping(nodes, at, beside, span_ns)
            seen[at] = ObservedNode(
                node, measured_ns, node.estimate.ns, span_ns, run.beside.get(node.name), load, overlapping
            )
    return [seen[at] for at in sorted(seen)]


def _overlapping(
    nodes: Sequence[Node], at: int, beside: Mapping[int, float], span_ns: float
) -> tuple[Contender | None, Comm | None]:
    if nodes[at].comm is None:
        always = [other for other, ns in beside.items() if ns >= span_ns * (1 - APART)]
        return contender_of(nodes[at]), nodes[always[0]].comm if len(beside) == len(always) == 1 else None
    by_load: dict[bool, float] = defaultdict(float)
    for other, ns in beside.items():
        by_load[contender_of(nodes[other]).kind is ComputeKind.MEMORY] += ns
    memory = by_load[True] > by_load[False]
    return (Contender(ComputeKind.MEMORY if memory else ComputeKind.MATMUL) if beside else None), None
