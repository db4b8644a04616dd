"""The simulator: replays a schedule on its resources. The one source of exposed time.

Resources are the host, which launches in order; one compute stream, which runs in order; and one queue per
process group, which runs its collectives in the order they were started. A collective begins when its
queue is free, the host has issued it, and the compute stream has done everything launched before it (as
NCCL's does, which synchronizes with the stream it is called from); where the profile says so, one that comes while a
kernel runs waits for it too. A wait holds the compute stream until its collective is done. A COMM node runs on its
queue while the compute stream stands still.

While both run they slow each other, as contention.py says. Time that the compute stream stands still at a
wait is *exposed*; it belongs to whichever collective of that queue is running then, so each collective's
exposed time is part of its duration, hidden = duration - exposed is never negative, and

    step = compute (with slowdown) + exposed + launch-bound idle time.

simulator/machine.py is the machine that does so; simulator/incremental.py replays no more than what a move changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from overlapc.estimators.device import IDEAL, DeviceProfile
from overlapc.estimators.simulator.lower_bound import LowerBound, lower_bound
from overlapc.estimators.simulator.machine import Machine, costs_of
from overlapc.estimators.simulator.native import Simulated, simulated
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Schedule

_TIMED = (*COMPUTE, *COMMUNICATION)


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """When a collective ran and how much of that the compute stream stood still for it."""

    start_ns: float
    end_ns: float
    exposed_ns: float

    @property
    def hidden_ns(self) -> float:
        """The part of its duration that compute ran beside."""
        return max(0.0, self.end_ns - self.start_ns - self.exposed_ns)


@dataclass(frozen=True, slots=True)
class Gap:
    """Time that a step loses. `Timeline.gap` is what it loses beyond every order: the step less its lower bound."""

    contention_ns: float  # compute slowed by communication beside it
    exposed_ns: float  # compute standing still at waits
    idle_ns: float  # waiting for the host, and between kernels

    def beyond(self, bound: LowerBound, step_ns: float) -> Gap:
        """The same without what the bound contains: gaps, the least contention, and what else it holds as exposed."""
        lost = {"idle": self.idle_ns, "contention": self.contention_ns, "exposed": self.exposed_ns}
        left_ns = bound.ns - (step_ns - sum(lost.values()))
        caps = (("idle", bound.idle_ns), ("contention", bound.contention_ns))
        for kind, most_ns in (*caps, *((kind, math.inf) for kind in ("exposed", "contention", "idle"))):
            inevitable_ns = max(0.0, min(lost[kind], most_ns, left_ns))
            lost[kind] -= inevitable_ns
            left_ns -= inevitable_ns
        return Gap(lost["contention"], lost["exposed"], lost["idle"])


@dataclass(frozen=True)
class Timeline:
    """A replay. `start_ns` and `end_ns` count by position in `schedule.nodes`.

    Of a START they are when its collective ran, not when it was issued; of a WAIT when the
    compute stream arrived and when it went on.
    """

    schedule: Schedule
    profile: DeviceProfile
    start_ns: tuple[float, ...]
    end_ns: tuple[float, ...]
    step_ns: float
    collectives: Mapping[str, CollectiveTime]  # every START and COMM, by node name
    launch_idle_ns: float  # the compute stream waiting for the host, and between kernels
    unknown: tuple[str, ...] = field(default=())  # nodes without an estimate, replayed as taking no time

    @property
    def exposed_ns(self) -> float:
        """Exposed time of all collectives together."""
        return sum(each.exposed_ns for each in self.collectives.values())

    @property
    def hidden_ns(self) -> float:
        """Hidden time of all collectives together."""
        return sum(each.hidden_ns for each in self.collectives.values())

    @property
    def compute_ns(self) -> float:
        """Time the compute stream was busy, slowdown by collectives included."""
        return sum(
            end - start
            for node, start, end in zip(self.schedule.nodes, self.start_ns, self.end_ns, strict=True)
            if node.kind in COMPUTE
        )

    @cached_property
    def lower_bound(self) -> LowerBound:
        """No order of these nodes takes less; see simulator/lower_bound.py."""
        return lower_bound(self.schedule, self.profile)

    @property
    def lower_bound_ns(self) -> float:
        """The same in ns."""
        return self.lower_bound.ns

    @cached_property
    def gap(self) -> Gap:
        """What the step has over the lower bound, by kind of loss."""
        alone_ns = sum(node.estimate.ns for node in self.schedule.nodes if node.kind in COMPUTE and node.estimate)
        lost = Gap(max(0.0, self.compute_ns - alone_ns), self.exposed_ns, self.launch_idle_ns)
        return lost.beyond(self.lower_bound, self.step_ns)

    def span(self, name: str) -> tuple[float, float]:
        """(start, end) of a node in ns."""
        at = self.schedule.position(name)
        return self.start_ns[at], self.end_ns[at]


def simulated_ns(schedule: Schedule, profile: DeviceProfile, nodes: Sequence[int]) -> float:
    """How long a step takes that has only these nodes of `schedule`, given by position, in this order."""
    count = len(schedule.nodes)
    machine = Machine(costs_of(schedule, profile), [0.0] * count, [0.0] * count)
    machine.run(nodes)
    machine.finish()
    return machine.now


def simulate(schedule: Schedule, profile: DeviceProfile = IDEAL, cache_dir: Path | None = None) -> Timeline:
    """Replay `schedule` in its present order. Nodes without an estimate take no time and are listed.

    cache_dir: as in `Context`.
    """
    count = len(schedule.nodes)
    late = [(wait, start) for wait, start in schedule.started.items() if wait < start]
    assert not late, f"{schedule.nodes[late[0][0]].name} is before {schedule.nodes[late[0][1]].name}, its start"
    costs = costs_of(schedule, profile)
    found = simulated(costs, cache_dir)
    if found is None:
        machine = Machine(costs, [0.0] * count, [0.0] * count)
        machine.run(range(count))
        machine.finish()
        exposed = [machine.exposed.get(at, 0.0) for at in range(count)]
        found = Simulated(machine.start, machine.end, exposed, machine.now, machine.idle)
    return Timeline(
        schedule, profile, tuple(found.start_ns), tuple(found.end_ns), found.step_ns,
        collectives={
            node.name: CollectiveTime(found.start_ns[at], found.end_ns[at], found.exposed_ns[at])
            for at, node in enumerate(schedule.nodes)
            if node.kind in COMMUNICATION
        },
        launch_idle_ns=found.idle_ns,
        unknown=tuple(node.name for node in schedule.nodes if node.kind in _TIMED and node.estimate is None),
    )  # fmt: skip
