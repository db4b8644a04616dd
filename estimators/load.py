"""The clock of a device under load: a GPU that draws more power than it may lowers it, within about 0.1 s.

On an H200 matmuls and attention take 1.15 to 1.3 times as long while a dense training step runs as they do in a short
burst, kernels bound by memory as long as ever. A compute stream that stands still now and then keeps its clock: with a
third of the time idle next to nothing is lost (`benchmarks/clock.py`).

Estimates are of full load. Once an order is chosen, how busy it keeps the device is known, and so is its clock.
"""

from __future__ import annotations

from overlapc.estimators.contention import Beside, load_of
from overlapc.estimators.timeline import Timeline, simulate
from overlapc.schedule.model import Estimate, Kind, Node

# The share of a graph in which the compute stream is busy, and the part of the difference between the highest clock and
# that of full load that was lost to it: forward and backward of five Llama-8B steps on 4 H200s. Up to 0.88 they lost
# 0.05 to 0.4 (but for one forward, with 0.75), from 0.96 on 0.5 to 0.95.
_COOL, _HOT = (0.88, 0.2), (0.97, 0.8)


def settled(timeline: Timeline) -> Timeline:
    """The same order at the clock that its own load leaves; the same object where the profile knows no difference."""
    profile, schedule = timeline.profile, timeline.schedule
    if not profile.throttle or timeline.step_ns <= 0:
        return timeline
    busy = timeline.compute_ns / timeline.step_ns
    share = min(1.0, max(0.0, (busy - _COOL[0]) / (_HOT[0] - _COOL[0])))
    heat = _COOL[1] + (_HOT[1] - _COOL[1]) * share
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
