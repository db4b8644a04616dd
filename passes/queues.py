"""A fast model of when collectives run, for passes that evaluate one move at a time.

The simulator judges the result of a whole pass; this model is for its inner loop: fixed durations (those of the last
replay, with contention), one queue for each process group, and a clock that `step` advances by one node.

Time runs in both directions: `mirrored` is the same step seen from its end, where a wait puts its collective in flight
and the start waits for it. The longest path is the same in both, so a rule for starts is also a rule for waits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from overlapc.estimators.timeline import Timeline
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Kind, Schedule

# Cheap nodes may move with a collective (the cast before a gather, the scaling after a scatter), but not the matmul
# that it overlaps: together, they may take at most this share of the collective's duration.
CARRIED_SHARE = 0.25


@dataclass
class Queues:
    """Durations and queue order of a schedule. Nodes are positions; a collective is the position of its start.

    `end_ns` of a collective is valid once `step` has passed its start.
    """

    kinds: list[Kind]
    known: list[bool]  # whether the node has an estimate
    compute_ns: list[float]
    collective_ns: list[float]
    end_ns: list[float]
    collective: dict[int, int]  # START, COMM or WAIT -> the collective
    opened_by: dict[int, list[int]]  # collective -> nodes that put it in flight, in order; several only if mirrored
    closed_by: dict[int, list[int]]  # collective -> its waits, in order; a bucket may have one for each output
    previous: dict[int, int]  # collective -> the collective before it on its queue
    next: dict[int, int]

    @classmethod
    def of(cls, schedule: Schedule, timeline: Timeline, margin: float = 1.0) -> Queues:
        """Take durations from a replay. margin: a factor on the estimates of collectives."""
        stretch = timeline.profile.collective_slowdown * margin
        nodes = schedule.nodes
        delay_ns = _begin_delay_ns(schedule, timeline) if timeline.profile.collectives_wait_for_kernels else 0.0
        nothing = [0.0] * len(nodes)
        queues = cls(
            kinds=[node.kind for node in nodes],
            known=[node.estimate is not None for node in nodes],
            compute_ns=list(nothing), collective_ns=list(nothing), end_ns=nothing,
            collective=dict(schedule.started), opened_by={}, closed_by=dict(schedule.waits_of), previous={}, next={},
        )  # fmt: skip
        last: dict[str, int] = {}
        for at, node in enumerate(nodes):
            if node.kind in COMPUTE:
                queues.compute_ns[at] = timeline.end_ns[at] - timeline.start_ns[at]
            elif node.kind in COMMUNICATION:
                queues.collective[at] = at
                queues.opened_by[at] = [at]
                if node.comm is not None:
                    queues.collective_ns[at] = 0.0 if node.estimate is None else node.estimate.ns * stretch + delay_ns
                    if node.queue in last:
                        queues.previous[at] = last[node.queue]
                        queues.next[last[node.queue]] = at
                    last[node.queue] = at
        return queues

    def mirrored(self) -> Queues:
        """Return the same step seen from its end: position 0 is the last node, and starts and waits change roles."""
        top = len(self.kinds) - 1
        turned = {Kind.START: Kind.WAIT, Kind.WAIT: Kind.START}

        def positions(lists: dict[int, list[int]]) -> dict[int, list[int]]:
            return {top - key: [top - at for at in reversed(ats)] for key, ats in lists.items()}

        def links(pairs: dict[int, int]) -> dict[int, int]:
            return {top - key: top - at for key, at in pairs.items()}

        synchronous = {at: ats for at, ats in self.opened_by.items() if self.kinds[at] is Kind.COMM}
        asynchronous = {at: ats for at, ats in self.opened_by.items() if at not in synchronous}
        return Queues(
            kinds=[turned.get(kind, kind) for kind in reversed(self.kinds)],
            known=self.known[::-1],
            compute_ns=self.compute_ns[::-1],
            collective_ns=self.collective_ns[::-1],
            end_ns=[0.0] * len(self.kinds),
            collective=links(self.collective),
            opened_by=positions({**self.closed_by, **synchronous}),
            closed_by=positions(asynchronous),
            previous=links(self.next),
            next=links(self.previous),
        )

    def queue_free_ns(self, collective: int) -> float:
        """Return when the collective before this one on its queue ends; -inf if this is the first."""
        previous = self.previous.get(collective)
        return -math.inf if previous is None else self.end_ns[previous]

    def swap(self, first: int, second: int) -> None:
        """Put `second`, which directly follows `first` on their queue, before `first`."""
        before, behind = self.previous.pop(first, None), self.next.pop(second, None)
        for one, other in ((before, second), (second, first), (first, behind)):
            if one is not None and other is not None:
                self.next[one], self.previous[other] = other, one
        if before is None:
            self.previous.pop(second, None)
        if behind is None:
            self.next.pop(first, None)

    def step(self, node: int, now_ns: float) -> float:
        """Return the compute stream's clock after `node`, which it reaches at `now_ns`; set a collective's `end_ns`."""
        kind = self.kinds[node]
        if kind in COMPUTE:
            return now_ns + self.compute_ns[node]
        if node not in self.collective:
            return now_ns
        collective = self.collective[node]
        if kind is not Kind.WAIT:
            self.end_ns[collective] = max(now_ns, self.queue_free_ns(collective)) + self.collective_ns[collective]
        return now_ns if kind is Kind.START else max(now_ns, self.end_ns[collective])


def _begin_delay_ns(schedule: Schedule, timeline: Timeline) -> float:
    """Return how long a collective waits for the kernel that is running when it is issued: the length of that kernel,
    averaged over time, not over kernels, because a long kernel is running more often."""
    spans = zip(schedule.nodes, timeline.start_ns, timeline.end_ns, strict=True)
    lengths = [end - start for node, start, end in spans if node.kind in COMPUTE]
    return sum(length * length for length in lengths) / sum(lengths) if any(lengths) else 0.0
