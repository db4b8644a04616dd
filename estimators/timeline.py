"""The simulator: replays a schedule on its resources. All exposed times come from here.

Resources are the host, which launches in order; one compute stream, which runs in order; and one queue per
process group, which runs its collectives in the order they were started. A collective begins when its
queue is free, the host has issued it, and the compute stream has finished everything launched before it (as with
NCCL, which synchronizes with the stream it is called from); if the profile says so, a collective issued while a kernel
runs also waits for that kernel. A wait blocks the compute stream until its collective is done. A COMM node runs on its
queue and blocks the compute stream meanwhile.

Overlapping compute and collectives slow each other down (contention.py). Time that the compute stream is blocked at a
wait is *exposed*. It is attributed to the collective of that queue that runs at the time, so each collective's
exposed time is part of its duration, hidden = duration - exposed is never negative, and

    step = compute (with slowdown) + exposed + launch-bound idle time.

simulator/machine.py implements this; simulator/incremental.py simulates again only what a move changes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from overlapc.estimators.device import IDEAL, DeviceProfile
from overlapc.estimators.simulator.lower_bound import LowerBound, lower_bound
from overlapc.estimators.simulator.machine import Costs, Machine, costs_of
from overlapc.estimators.simulator.native import Simulated, simulated
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Schedule

_TIMED = (*COMPUTE, *COMMUNICATION)


@dataclass(frozen=True, slots=True)
class CollectiveTime:
    """When a collective ran, and how much of that time the compute stream waited for it."""

    start_ns: float
    end_ns: float
    exposed_ns: float

    @property
    def hidden_ns(self) -> float:
        """The part of its duration that is not exposed."""
        return max(0.0, self.end_ns - self.start_ns - self.exposed_ns)


@dataclass(frozen=True, slots=True)
class Gap:
    """Lost time of a step by cause. `Timeline.gap` is only the loss above the step's lower bound."""

    contention_ns: float  # time that overlapping communication adds to compute
    exposed_ns: float  # compute blocked at waits
    idle_ns: float  # waiting for the host, and gaps between kernels

    def beyond(self, bound: LowerBound, step_ns: float) -> Gap:
        """Return the loss without the part that the bound contains.

        That part is subtracted from idle time up to the bound's idle time, then from contention up to the bound's
        contention, then from exposed time.
        """
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
    """The result of a simulation. `start_ns` and `end_ns` are indexed by position in `schedule.nodes`.

    For a START they are when its collective ran, not when it was issued; for a WAIT, when the
    compute stream reached it and when it continued.
    """

    schedule: Schedule
    profile: DeviceProfile
    start_ns: tuple[float, ...]
    end_ns: tuple[float, ...]
    step_ns: float
    collectives: Mapping[str, CollectiveTime]  # every START and COMM, by node name
    launch_idle_ns: float  # the compute stream waiting for the host, and gaps between kernels
    unknown: tuple[str, ...] = field(default=())  # nodes without an estimate, simulated as taking no time
    cache_dir: Path | None = field(default=None, repr=False, compare=False)  # of the simulator in C

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
        """Time that the compute stream is busy, including the slowdown by collectives."""
        return sum(
            end - start
            for node, start, end in zip(self.schedule.nodes, self.start_ns, self.end_ns, strict=True)
            if node.kind in COMPUTE
        )

    @cached_property
    def lower_bound(self) -> LowerBound:
        """Lower bound of the step over all orders of these nodes; see simulator/lower_bound.py."""
        return lower_bound(self.schedule, self.profile)

    @property
    def lower_bound_ns(self) -> float:
        """The lower bound in ns."""
        return self.lower_bound.ns

    @cached_property
    def gap(self) -> Gap:
        """The time of the step above its lower bound, by cause."""
        alone_ns = sum(node.estimate.ns for node in self.schedule.nodes if node.kind in COMPUTE and node.estimate)
        lost = Gap(max(0.0, self.compute_ns - alone_ns), self.exposed_ns, self.launch_idle_ns)
        return lost.beyond(self.lower_bound, self.step_ns)

    def span(self, name: str) -> tuple[float, float]:
        """Return (start, end) of a node in ns."""
        at = self.schedule.position(name)
        return self.start_ns[at], self.end_ns[at]


def simulated_ns(timeline: Timeline, nodes: Sequence[int]) -> float:
    """Return the time in ns of a step that runs only `nodes` of the timeline's schedule, given by position."""
    costs = costs_of(timeline.schedule, timeline.profile).of_order(nodes, timeline.schedule.started, ())
    return replay(costs, timeline.cache_dir).step_ns


def replay(costs: Costs, cache_dir: Path | None) -> Simulated:
    """Simulate all nodes in the order of `costs`; in Python if there is no C compiler."""
    found = simulated(costs, cache_dir)
    if found is None:
        count = len(costs.ns)
        machine = Machine(costs, [0.0] * count, [0.0] * count)
        machine.run(range(count))
        machine.finish()
        exposed = [machine.exposed.get(at, 0.0) for at in range(count)]
        found = Simulated(machine.start, machine.end, exposed, machine.now, machine.idle)
    return found


def simulate(schedule: Schedule, profile: DeviceProfile = IDEAL, cache_dir: Path | None = None) -> Timeline:
    """Simulate `schedule` in its present order. Nodes without an estimate take no time and are in `unknown`.

    cache_dir: as in `Context`.
    """
    late = [(wait, start) for wait, start in schedule.started.items() if wait < start]
    assert not late, f"{schedule.nodes[late[0][0]].name} is before {schedule.nodes[late[0][1]].name}, its start"
    found = replay(costs_of(schedule, profile), cache_dir)
    return Timeline(
        schedule, profile, tuple(found.start_ns), tuple(found.end_ns), found.step_ns,
        collectives={
            node.name: CollectiveTime(found.start_ns[at], found.end_ns[at], found.exposed_ns[at])
            for at, node in enumerate(schedule.nodes)
            if node.kind in COMMUNICATION
        },
        launch_idle_ns=found.idle_ns,
        unknown=tuple(node.name for node in schedule.nodes if node.kind in _TIMED and node.estimate is None),
        cache_dir=cache_dir,
    )  # fmt: skip
