"""A cheap model of when collectives run, for passes that weigh one move at a time.

The simulator is the judge of a whole pass; this is its inner loop: fixed durations (those of the last replay,
with contention), one queue a process group, and a clock that `step` carries over one node.

Time runs both ways: `mirrored` is the same step seen from its end, where every wait puts a collective in flight and its
start waits for it. Both ways the longest path is the same, so what is a rule for starts is one for waits too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from overlapc.estimators.timeline import Timeline
from overlapc.schedule.model import COMMUNICATION, COMPUTE, Kind, Schedule

# A collective may take cheap nodes along (the cast before a gather, the scaling after a scatter), not the
# matmul that it overlaps with: at most this share of its own duration.
CARRIED_SHARE = 0.25


@dataclass
class Queues:
    """Durations and queue order of a schedule, nodes as positions. A collective is known by the position of its start.

    `end_ns` of a collective is known once `step` passed it.
    """

    kinds: list[Kind]
    known: list[bool]  # whether somebody could estimate the node
    compute_ns: list[float]
    collective_ns: list[float]
    end_ns: list[float]
    collective: dict[int, int]  # START, COMM or WAIT -> the collective
    opened_by: dict[int, list[int]]  # collective -> what puts it in flight, in order; mirrored, there may be several
    closed_by: dict[int, list[int]]  # collective -> its waits in order: a bucket may have one an output
    previous: dict[int, int]  # collective -> the one before it on its queue
    next: dict[int, int]

    @classmethod
    def of(cls, schedule: Schedule, timeline: Timeline, margin: float = 1.0) -> Queues:
        """From a replay. margin: collectives are taken to last this many times as long as estimated."""
        stretch = timeline.profile.collective_slowdown * margin
        nodes = schedule.nodes
        delay_ns = _begin_delay_ns(schedule, timeline) if timeline.profile.collectives_wait_for_kernels else 0.0
        nothing = [0.0] * len(nodes)
        queues = cls(
            kinds=[node.kind for node in nodes],
            known=[node.estimate is not None for node in nodes],
            compute_ns=list(nothing), collective_ns=list(nothing), end_ns=nothing,
            collective=dict(schedule.started), opened_by={}, closed_by={}, previous={}, next={},
        )  # fmt: skip
        for wait, start in queues.collective.items():
            queues.closed_by.setdefault(start, []).append(wait)
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
        """The same seen from the end: position 0 is the last node, starts wait and waits start."""
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
        if node not in self.collective:
            return now_ns
        collective = self.collective[node]
        if kind is not Kind.WAIT:
            self.end_ns[collective] = max(now_ns, self.queue_free_ns(collective)) + self.collective_ns[collective]
        return now_ns if kind is Kind.START else max(now_ns, self.end_ns[collective])


def _begin_delay_ns(schedule: Schedule, timeline: Timeline) -> float:
    """How long a collective stands behind the kernel that runs when it comes: the length of that kernel, on average
    over time (not over kernels: a long one is met more often)."""
    spans = zip(schedule.nodes, timeline.start_ns, timeline.end_ns, strict=True)
    lengths = [end - start for node, start, end in spans if node.kind in COMPUTE]
    return sum(each * each for each in lengths) / sum(lengths) if any(lengths) else 0.0
