"""The clock of a device under load: a GPU that draws more power than it may lowers it, within about 0.1 s.

On an H200 matmuls and attention take 1.15 to 1.3 times as long while a dense training step runs as they do in a short
burst, kernels bound by memory as long as ever. How much of that a step loses depends on how much it computes: with a
third of the time idle next to nothing (`DeviceProfile.heat`). What a collective slows computes no more for that.

Estimates are of full load. Once an order is chosen, how busy it keeps the device is known, and so is its clock.
"""

from __future__ import annotations

from overlapc.estimators.contention import Beside, load_of
from overlapc.estimators.device import rate_at
from overlapc.estimators.timeline import Timeline, simulate
from overlapc.schedule.model import Estimate, Kind, Node


def settled(timeline: Timeline) -> Timeline:
    """The same order at the clock that its own load leaves; the same object where the profile knows no difference."""
    profile, schedule = timeline.profile, timeline.schedule
    if not profile.throttle or not profile.heat or timeline.step_ns <= 0:
        return timeline
    computing_ns = sum(
        node.estimate.ns
        for node in schedule.nodes
        if node.kind in (Kind.KERNEL, Kind.EXTERN) and node.estimate is not None
    )
    heat = rate_at(profile.heat, round(1000 * computing_ns / timeline.step_ns))
    estimates = {}
    for node in schedule.nodes:
        times = _times(node, timeline)
        if times > 1.0 and node.estimate is not None:
            at_load = (1.0 + (times - 1.0) * heat) / times
            estimates[node.name] = Estimate(node.estimate.ns * at_load, node.estimate.source)
    return simulate(schedule.with_estimates(estimates), profile) if estimates else timeline


def _times(node: Node, timeline: Timeline) -> float:
    if node.kind is not Kind.EXTERN or node.work is None:
        return 1.0
    kind = load_of(node).beside
    return 1.0 if kind is Beside.MEMORY else timeline.profile.throttled(kind.value, node.work.flops)
