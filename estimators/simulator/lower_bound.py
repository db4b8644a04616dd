"""A step time that no order of a schedule's nodes can beat.

Every node has a *head*, the least time that must pass before it can begin, and a *tail*, the least that
must pass after it ends, both along its dependences (mutations and barriers included, which no pass may
undo, but not the order among collectives, which a pass may be allowed to change). Each resource (the compute
stream, each queue) runs one node at a time, so a step takes at least as long as the best preemptive schedule
of its nodes between their heads and tails, which Jackson's rule finds (run the ready node with the longest
tail) in O(n log n). Launches cost host time one after the other, and nothing is slowed by anything else.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from overlapc.estimators.device import DeviceProfile
from overlapc.estimators.simulator.machine import on_grid
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Kind, Schedule

_LAUNCHED = (*COMPUTE, *COMMUNICATION)


def lower_bound_ns(schedule: Schedule, profile: DeviceProfile) -> float:
    """At most the step time of every legal order of `schedule` on `profile`."""
    count = len(schedule.nodes)
    deps = dependencies.of(schedule)
    launch_ns = on_grid(profile.launch_ns)
    duration = [  # as a replay takes them
        on_grid(node.estimate.ns) if node.estimate is not None and node.kind in _LAUNCHED else 0.0
        for node in schedule.nodes
    ]
    is_start = [node.kind is Kind.START for node in schedule.nodes]
    waits_for = schedule.started
    # A START does not hold back what only has to be issued after it; its wait is what takes its time.
    head, tail = [0.0] * count, [0.0] * count
    for at in range(count):
        node = schedule.nodes[at]
        launch = launch_ns if node.kind in _LAUNCHED else 0.0
        for p in deps.preds[at]:
            if deps.why[p, at] is Why.COLLECTIVE_ORDER:
                continue
            if not is_start[p] or waits_for.get(at) == p:
                head[at] = max(head[at], head[p] + duration[p])
            else:
                head[at] = max(head[at], head[p])
        head[at] = max(head[at], launch)
    for at in range(count - 1, -1, -1):
        for p in deps.preds[at]:
            if deps.why[p, at] is Why.COLLECTIVE_ORDER:
                continue
            if not is_start[p] or waits_for.get(at) == p:
                tail[p] = max(tail[p], tail[at] + duration[at])
    # A start's own duration follows its issue; nodes that depend on its issue alone bound nothing more.
    resources: dict[str, list[int]] = {}
    for at, node in enumerate(schedule.nodes):
        if node.kind in COMMUNICATION and node.comm is not None:
            resources.setdefault(f"@{node.comm.queue}", []).append(at)
        if node.kind in (*COMPUTE, Kind.COMM):
            resources.setdefault("", []).append(at)
    launched = [at for at, node in enumerate(schedule.nodes) if node.kind in _LAUNCHED]
    host = len(launched) * launch_ns + min(duration[at] + tail[at] for at in launched) if launched else 0.0
    machines = (one_machine_ns(head, duration, tail, nodes) for nodes in resources.values())
    return max(host, max(machines, default=0.0))


def one_machine_ns(
    head: Sequence[float], duration: Sequence[float], tail: Sequence[float], nodes: Sequence[int]
) -> float:
    """The shortest preemptive schedule of `nodes` on one machine: a lower bound for any order of them."""
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
