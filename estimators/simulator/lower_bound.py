"""A lower bound of the step time over all orders of a schedule's nodes.

Every node has a *head*, the minimum time before it can begin, and a *tail*, the minimum time after it ends, both along
its dependences. These include mutations and barriers, which no pass may undo, but not the order among collectives,
which a pass may be allowed to change. Each resource (the compute stream, each queue) runs one node at a time, so a step
takes at least as long as the best preemptive schedule of its nodes between their heads and tails, which Jackson's rule
(run the ready node with the longest tail) finds in O(n log n). Launches cost host time one after the other.

That bound ignores contention. A second bound of the compute stream is the sum of its kernels' times without contention,
the gaps between them, and the least contention (least_contention.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.simulator.least_contention import least_contention_ns
from overlapc.estimators.simulator.machine import Costs, StepKind, costs_of
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.model import Schedule

_ROUNDING_NS = 2.0**-8  # per node: times are rounded to multiples of 2^-10 ns, a few of them for each node


@dataclass(frozen=True, slots=True)
class LowerBound:
    """The lower bound of a step, and the contention and idle time that every order has."""

    ns: float
    contention_ns: float = 0.0  # the least contention between compute and collectives
    idle_ns: float = 0.0  # gaps between kernels


def lower_bound(schedule: Schedule, profile: DeviceProfile) -> LowerBound:
    """Return a lower bound of the step time of all legal orders of `schedule` on `profile`."""
    costs = costs_of(schedule, profile)
    step, count = costs.step, len(schedule.nodes)
    launched = [at for at in range(count) if step[at] == StepKind.COMPUTE or costs.is_collective(at)]
    if not launched:
        return LowerBound(0.0)
    on_stream = [at for at in launched if step[at] != StepKind.START]
    gap = [costs.gap_ns if step[at] in (StepKind.COMPUTE, StepKind.COMM) else 0.0 for at in range(count)]
    takes = [0.0] * count  # including the gap before the node
    for at in launched:
        takes[at] = gap[at] + costs.ns[at]
    head, tail = _heads_and_tails(schedule, costs, takes, gap)
    # By queue; a blocking collective (COMM) runs on its queue after its gap.
    queues: dict[int, list[int]] = {}
    for at in launched:
        if costs.is_collective(at) and schedule.nodes[at].comm is not None:
            queues.setdefault(costs.queue[at], []).append(at)
    behind_gap = [ns + more for ns, more in zip(head, gap, strict=True)]
    machines = [one_machine_ns(behind_gap, costs.ns, tail, nodes) for nodes in queues.values()]
    contention_ns = 0.0
    host_ns = len(launched) * costs.launch_ns + min(costs.ns[at] + tail[at] for at in launched)
    if on_stream:
        machines.append(one_machine_ns(head, takes, tail, on_stream))
        ends_ns = min(head[at] for at in on_stream) + min(tail[at] for at in on_stream)
        idle_ns = ends_ns + sum(costs.ns[at] for at in on_stream if step[at] == StepKind.COMM) + sum(gap)
        kernels_ns = sum(costs.ns[at] for at in on_stream if step[at] == StepKind.COMPUTE)
        contention_ns = least_contention_ns(costs, idle_ns)
        machines.append(kernels_ns + idle_ns + contention_ns - count * _ROUNDING_NS)
    return LowerBound(max(host_ns, *machines), contention_ns, sum(gap))


def _heads_and_tails(
    schedule: Schedule, costs: Costs, takes: Sequence[float], gap: Sequence[float]
) -> tuple[list[float], list[float]]:
    """Return the minimum time before each node (or the gap before it) begins, and the minimum time after it ends."""
    count = len(takes)
    deps, step = dependencies.of(schedule), costs.step
    head, tail = [0.0] * count, [0.0] * count

    def between(before: int, after: int) -> float:
        """Return the minimum time between the beginnings of two nodes: a START takes no time except for its wait."""
        if step[before] == StepKind.START and costs.waits_for.get(after) != before:
            return 0.0
        return takes[before]

    for at in range(count):
        if step[at] == StepKind.COMPUTE or costs.is_collective(at):
            head[at] = max(0.0, costs.launch_ns - gap[at])
        for before in deps.preds[at]:
            if deps.why[before, at] is not Why.COLLECTIVE_ORDER:
                head[at] = max(head[at], head[before] + between(before, at))
    for at in range(count - 1, -1, -1):
        for before in deps.preds[at]:
            if deps.why[before, at] is Why.COLLECTIVE_ORDER:
                continue
            if step[before] != StepKind.START or costs.waits_for.get(at) == before:
                tail[before] = max(tail[before], tail[at] + takes[at])
    return head, tail


def one_machine_ns(
    head: Sequence[float], duration: Sequence[float], tail: Sequence[float], nodes: Sequence[int]
) -> float:
    """Return the length of the shortest preemptive schedule of `nodes` on one machine, a lower bound for any order."""
    waiting = sorted(nodes, key=lambda at: head[at])
    ready: list[tuple[float, int]] = []
    left = {at: duration[at] for at in nodes}
    now, best, coming = 0.0, 0.0, 0
    while ready or coming < len(waiting):
        if not ready:
            now = max(now, head[waiting[coming]])
        while coming < len(waiting) and head[waiting[coming]] <= now:
            heapq.heappush(ready, (-tail[waiting[coming]], waiting[coming]))
            coming += 1
        at = ready[0][1]
        until = head[waiting[coming]] if coming < len(waiting) else float("inf")
        if now + left[at] <= until:
            now += left[at]
            best = max(best, now + tail[at])
            heapq.heappop(ready)
        else:
            left[at] -= until - now
            now = until
    return best
