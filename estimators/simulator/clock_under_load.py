"""The clock of a device under load: a GPU at its power limit lowers its clock within about 0.1 s.

On an H200 matmuls and attention take 1.15 to 1.3 times as long in a dense training step as in a short burst;
memory-bound kernels do not slow down. The clock depends on the utilization, the fraction of the time in which the
device computes (`DeviceProfile.clock_by_utilization`): if the device is idle a third of the time, the clock is nearly
the highest. Compute that a collective slows down counts with its time without contention, because it does the same
work. A collective draws power, too, and counts in part (`collective_load`).

Estimates are for full load. Once an order is chosen, its utilization and therefore its clock are known.
"""

from __future__ import annotations

from overlapc.estimators.contention import ComputeKind, contender_of
from overlapc.estimators.device import DeviceProfile, rate_at
from overlapc.estimators.timeline import Timeline, simulate
from overlapc.schedule.model import COMPUTE, Estimate, Kind, Node, Schedule


def changes_clock(profile: DeviceProfile) -> bool:
    """Whether the device's clock is known to depend on its load."""
    return bool(profile.throttle and profile.clock_by_utilization)


def settled(timeline: Timeline) -> Timeline:
    """Return the order simulated at the clock under its own load; the same object if no estimate changes."""
    schedule, profile = timeline.schedule, timeline.profile
    estimates = estimates_at_load(schedule, profile, timeline.step_ns)
    return simulate(schedule.with_estimates(estimates), profile, timeline.cache_dir) if estimates else timeline


def estimates_at_load(schedule: Schedule, profile: DeviceProfile, step_ns: float) -> dict[str, Estimate]:
    """Return the estimates that change at the clock under the load of `schedule`, if its step takes `step_ns`."""
    if not changes_clock(profile) or step_ns <= 0:
        return {}
    clock_ratio = rate_at(profile.clock_by_utilization, round(1000 * _busy_ns(schedule, profile) / step_ns))
    estimates = {}
    for node in schedule.nodes:
        times = _times(node, profile)
        if times > 1.0 and node.estimate is not None:
            at_load = max(1.0, times * clock_ratio) / times
            estimates[node.name] = Estimate(node.estimate.ns * at_load, node.estimate.source)
    return estimates


def _busy_ns(schedule: Schedule, profile: DeviceProfile) -> float:
    """Return the time of compute without contention, plus that of collectives weighted by their power."""
    computing_ns = communicating_ns = 0.0
    for node in schedule.nodes:
        if node.estimate is not None and node.kind in COMPUTE:
            computing_ns += node.estimate.ns
        elif node.estimate is not None and node.comm is not None:
            communicating_ns += node.estimate.ns
    return computing_ns + profile.collective_load * communicating_ns


def _times(node: Node, profile: DeviceProfile) -> float:
    if node.kind is not Kind.EXTERN or node.work is None:
        return 1.0
    kind = contender_of(node).kind
    return 1.0 if kind is ComputeKind.MEMORY else profile.throttled(kind.value, node.work.flops)
