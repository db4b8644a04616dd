"""A cheap model of when collectives run, for passes that weigh one move at a time.

The simulator is the judge of a whole pass; this is its inner loop: fixed durations (those of the last replay,
with contention), one queue a process group, and a clock that `step` carries over one node.
"""

from __future__ import annotations

import math

from overlapc.estimators.timeline import Timeline
from overlapc.schedule.model import Kind, Schedule

COMPUTE = (Kind.KERNEL, Kind.EXTERN)
# A collective may take cheap nodes along (the cast before a gather, the scaling after a scatter), not the
# matmul that it overlaps with: at most this share of its own duration.
CARRIED_SHARE = 0.25


class Queues:
    """Durations and queue order of a schedule; `end_ns` of a collective is known once `step` passed it.

    margin: collectives are taken to last this many times as long as estimated.
    """

    def __init__(self, schedule: Schedule, timeline: Timeline, margin: float = 1.0) -> None:
        stretch = timeline.profile.collective_slowdown * margin
        nodes = schedule.nodes
        delay_ns = _begin_delay_ns(schedule, timeline) if timeline.profile.collectives_wait_for_kernels else 0.0
        self.kinds = [node.kind for node in nodes]
        self.known = [node.estimate is not None for node in nodes]
        self.compute_ns = [0.0] * len(nodes)
        self.collective_ns = [0.0] * len(nodes)
        self.end_ns = [0.0] * len(nodes)
        self.previous: dict[int, int] = {}  # collective -> the one before it on its queue
        self.next: dict[int, int] = {}
        self.start_of = dict(schedule.started)
        self.waits_of: dict[int, list[int]] = {}  # a bucket may have one an output; in order
        for wait, start in self.start_of.items():
            self.waits_of.setdefault(start, []).append(wait)
        last: dict[str, int] = {}
        for at, node in enumerate(nodes):
            if node.kind in COMPUTE:
                self.compute_ns[at] = timeline.end_ns[at] - timeline.start_ns[at]
            elif node.kind in (Kind.START, Kind.COMM) and node.comm is not None:
                self.collective_ns[at] = 0.0 if node.estimate is None else node.estimate.ns * stretch + delay_ns
                if node.comm.group in last:
                    self.previous[at] = last[node.comm.group]
                    self.next[last[node.comm.group]] = at
                last[node.comm.group] = at

    def queue_free_ns(self, collective: int) -> float:
        """When the collective before this one on its queue ends."""
        previous = self.previous.get(collective)
        return -math.inf if previous is None else self.end_ns[previous]

    def swap(self, first: int, second: int) -> None:
        """Let `second`, which follows `first` on their queue, go ahead of it."""
        before, behind = self.previous.pop(first, None), self.next.pop(second, None)
        for one, other in ((before, second), (second, first), (first, behind)):
            if one is not None and other is not None:
                self.next[one], self.previous[other] = other, one
        if before is None:
            self.previous.pop(second, None)
        if behind is None:
            self.next.pop(first, None)

    def step(self, node: int, now_ns: float) -> float:
        """The compute stream's clock after `node`, which it reaches at `now_ns`; notes a collective's end."""
        kind = self.kinds[node]
        if kind in COMPUTE:
            return now_ns + self.compute_ns[node]
        if kind is Kind.WAIT:
            return max(now_ns, self.end_ns[self.start_of[node]]) if node in self.start_of else now_ns
        if kind in (Kind.START, Kind.COMM):
            self.end_ns[node] = max(now_ns, self.queue_free_ns(node)) + self.collective_ns[node]
            return self.end_ns[node] if kind is Kind.COMM else now_ns
        return now_ns


def _begin_delay_ns(schedule: Schedule, timeline: Timeline) -> float:
    """How long a collective stands behind the kernel that runs when it comes: the length of that kernel, on average
    over time (not over kernels: a long one is met more often)."""
    spans = zip(schedule.nodes, timeline.start_ns, timeline.end_ns, strict=True)
    lengths = [end - start for node, start, end in spans if node.kind in COMPUTE]
    return sum(each * each for each in lengths) / sum(lengths) if any(lengths) else 0.0
