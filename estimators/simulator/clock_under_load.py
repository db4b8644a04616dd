"""The clock of a device under load: a GPU that draws more power than it may lowers it, within about 0.1 s.

On an H200 matmuls and attention take 1.15 to 1.3 times as long while a dense training step runs as they do in a short
burst, kernels bound by memory as long as ever. The clock goes by how much of the time the device computes: with a third
of it idle next to nothing is lost (`DeviceProfile.heat`). What a collective slows computes no more for that, and a
collective draws power of its own: its time counts for a part (`collective_load`).

Estimates are of full load. Once an order is chosen, how busy it keeps the device is known, and so is its clock.
"""

from __future__ import annotations

from overlapc.estimators.contention import Beside, load_of
from overlapc.estimators.device import DeviceProfile, rate_at
from overlapc.estimators.timeline import Timeline, simulate
from overlapc.schedule.model import COMPUTE, Estimate, Kind, Node, Schedule


def changes_clock(profile: DeviceProfile) -> bool:
    """Whether the device's clock is known to go by its load."""
    return bool(profile.throttle and profile.heat)


def settled(timeline: Timeline) -> Timeline:
    """The same order at the clock that its own load leaves; the same object where the profile knows no difference."""
    schedule, profile = timeline.schedule, timeline.profile
    estimates = estimates_at_load(schedule, profile, timeline.step_ns)
    return simulate(schedule.with_estimates(estimates), profile) if estimates else timeline


def estimates_at_load(schedule: Schedule, profile: DeviceProfile, step_ns: float) -> dict[str, Estimate]:
    """What takes another time than as estimated, at the clock that these nodes leave if all of them take `step_ns`."""
    if not changes_clock(profile) or step_ns <= 0:
        return {}
    heat = rate_at(profile.heat, round(1000 * _busy_ns(schedule, profile) / step_ns))
    estimates = {}
    for node in schedule.nodes:
        times = _times(node, profile)
        if times > 1.0 and node.estimate is not None:
            at_load = max(1.0, times * heat) / times
            estimates[node.name] = Estimate(node.estimate.ns * at_load, node.estimate.source)
    return estimates


def _busy_ns(schedule: Schedule, profile: DeviceProfile) -> float:
    """Time of compute by itself, and of collectives as far as they draw power."""
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
    kind = load_of(node).beside
    return 1.0 if kind is Beside.MEMORY else profile.throttled(kind.value, node.work.flops)
