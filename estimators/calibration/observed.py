"""Measured nodes together with a profile's prediction for them."""

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
APART = 0.02  # tolerance as a fraction of a node's time, for "not overlapped" and for "overlapped throughout"


@dataclass(frozen=True)
class Run:
    """The measured times of a schedule, by node."""

    schedule: Schedule
    measured_ns: Mapping[str, float]
    beside: Mapping[str, float]  # fraction of the time in which compute and communication overlapped; empty: not known


@dataclass(frozen=True, slots=True)
class ObservedNode:
    """A measured node with its predicted times."""

    node: Node
    measured_ns: float
    alone_ns: float  # predicted without overlap
    predicted_ns: float  # predicted in the simulated step, with contention
    beside: float | None
    load: Contender | None  # the compute node; for a collective, the main kind of compute that overlaps it
    overlapping: Comm | None  # for compute: the only collective that overlaps it, if for its whole predicted duration

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return KINDS[self.node.kind]

    @property
    def was_alone(self) -> bool:
        """Whether no other work overlapped the node."""
        return self.beside is not None and self.beside <= APART

    @property
    def seen_alone_ns(self) -> float:
        """The measured time without the predicted slowdown by overlapping nodes."""
        return self.measured_ns if self.was_alone else self.measured_ns * self.alone_ns / self.predicted_ns

    @property
    def overlapped_throughout(self) -> bool:
        """Whether other work overlapped the node for its whole duration."""
        return self.beside is not None and self.beside >= 1 - APART

    @property
    def off(self) -> float:
        """The error of the prediction: the absolute logarithm of measured over predicted time."""
        return abs(math.log(self.measured_ns / self.predicted_ns))


def estimated(schedule: Schedule, profile: DeviceProfile) -> Schedule:
    """Return a schedule with estimates from the profile; nodes unknown to the profile keep their estimates."""
    chain = from_profile(profile)
    found = {node.name: chain.estimate(node) for node in schedule.nodes}
    return schedule.with_estimates({name: each for name, each in found.items() if each is not None})


def observe(profile: DeviceProfile, runs: Iterable[Run]) -> list[ObservedNode]:
    """Return every node that was measured and has a predicted time above 0, in the order of the schedules."""
    return [seen for run in runs for seen in _observe(profile, run)]


def _observe(profile: DeviceProfile, run: Run) -> list[ObservedNode]:
    timeline = simulate(estimated(run.schedule, profile), profile)
    nodes = timeline.schedule.nodes
    computing = [at for at, node in enumerate(nodes) if node.kind in COMPUTE]
    sending = sorted((at for at, node in enumerate(nodes) if node.comm is not None), key=timeline.start_ns.__getitem__)

    def overlaps(at: int, others: list[int], first: int) -> tuple[dict[int, float], int]:
        """Return other node -> time that it overlaps `at`, and the first other node that later nodes may overlap."""
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
