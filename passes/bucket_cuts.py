"""Where buckets are cut: wherever that makes the step shorter, in the order that the passes after `bucket` lead to.

    a, b = all_gather(p, q) @dp node=a+1 : 20us; u = wait(a); x = kernel(u) : 30us; v = wait(b); y = kernel(x, v)
 -> a = all_gather(p) @dp : 11us; b = all_gather(q) @dp : 11us; u = wait(a); x = kernel(u) : 30us; v = wait(b); ...

A whole bucket that compute hides is best: one latency, one meeting of ranks. The first gathers of a step and its last
reductions nothing hides: there compute may begin with the first tensors, or the first gradients leave while the last
are computed. Which buckets are exposed depends on the order, so the merged schedule is ordered by the rules of the
default passes (milliseconds, without the search). Each bucket that is exposed there is cut where that helps most, as
long as a replay of the nodes around it becomes shorter. The cuts of all buckets together are kept if the step that they
lead to, ordered again, is shorter; then the same once more, for what is exposed now.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from overlapc.passes.base import Context
from overlapc.passes.bucket_cost import BucketCost, bucket_node, comm_of
from overlapc.passes.judge import cost
from overlapc.passes.merging import with_merged
from overlapc.passes.plan_overlap import plan_overlap
from overlapc.passes.raise_under_memory import raise_under_memory
from overlapc.passes.sink_under_memory import sink_under_memory
from overlapc.passes.sink_waits import sink_waits
from overlapc.schedule.collective_kinds import KINDS
from overlapc.schedule.model import Buffer, Kind, Node, Schedule

# A collective that is exposed for less than this share of the step is left alone.
WORTH_IT = 0.0005
# Nodes before and after a bucket's own that are replayed with it: about one layer.
AROUND = 64
# Of a bucket of more tensors only so many places for a cut are tried, evenly spaced.
MOST_PLACES = 16
# All replays of one schedule together may take so many nodes: a few tenths of a second.
MOST_NODES = 200_000


def in_order(schedule: Schedule, ctx: Context) -> Schedule:
    """`schedule` in the order from which the default passes begin to search."""
    for rule in (plan_overlap, raise_under_memory, sink_under_memory, sink_waits):
        schedule, _ = rule(schedule, ctx)
    return schedule


def cuts(ordered: Schedule, members: Mapping[str, Sequence[Node]], ctx: Context) -> frozenset[str]:
    """Members with which another bucket should begin. members: of each bucket in `ordered`, by its name."""
    found: set[str] = set()
    timeline = ctx.timeline(ordered)
    exposed = {name: timeline.collectives[name].exposed_ns for name in members}
    nodes_left = MOST_NODES
    for name in sorted(members, key=lambda name: -exposed[name]):
        if exposed[name] < WORTH_IT * timeline.step_ns:
            break
        window = _Window.of(ordered, name, members[name], ctx)
        begins = window.best_cuts(nodes_left)
        nodes_left -= window.nodes_replayed
        found.update(members[name][at].name for at in begins)
    return frozenset(found)


@dataclass
class _Window:
    """A bucket and what stands around it, as a schedule of its own."""

    schedule: Schedule
    at: int  # of the bucket
    members: Sequence[Node]
    ctx: Context
    cost: BucketCost
    nodes_replayed: int = 0

    @classmethod
    def of(cls, ordered: Schedule, name: str, members: Sequence[Node], ctx: Context) -> _Window:
        """From where its first tensor is made to where its last is waited for, and a layer on both sides, without
        collectives that are waited for later: a replay would wait for them at its end."""
        at = ordered.position(name)
        makers = (ordered.producers.get(read) for member in members for read in member.reads)
        first = min((maker for maker in makers if maker is not None), default=at) if _sends_results(members) else at
        last = max((wait for wait, start in ordered.started.items() if start == at), default=at)
        low, high = max(0, first - AROUND), min(len(ordered.nodes), last + 1 + AROUND)
        waited = {start for wait, start in ordered.started.items() if wait < high}
        kept = [each for each in range(low, high) if ordered.nodes[each].kind is not Kind.START or each in waited]
        nodes = tuple(ordered.nodes[each] for each in kept)
        buffers: dict[str, Buffer] = {}
        for node in nodes:
            for each in (*node.reads, *node.writes):
                alias: str | None = each
                while alias is not None and alias not in buffers:
                    buffers[alias] = ordered.buffers[alias]
                    alias = buffers[alias].alias_of
        window = Schedule(name, nodes, buffers, like=ordered)
        return cls(window, kept.index(at), members, ctx, BucketCost(ctx, members[0]))

    def best_cuts(self, most_nodes: int) -> frozenset[int]:
        """Numbers of members with which another bucket begins: the best cut first, as long as there is one."""
        begins: frozenset[int] = frozenset()
        best = cost(self.schedule, self.ctx)
        step = -(-len(self.members) // MOST_PLACES)
        while True:
            tried = []
            for at in range(step, len(self.members), step):
                if at not in begins and self.nodes_replayed < most_nodes:
                    tried.append((cost(self._cut(begins | {at}), self.ctx), begins | {at}))
            if not tried or min(tried, key=lambda each: each[0])[0] >= best:
                return begins
            best, begins = min(tried, key=lambda each: each[0])

    def _cut(self, begins: frozenset[int]) -> Schedule:
        """Gathers start where the bucket did, one after the other; reductions each where its last gradient is made."""
        instead: dict[int, list[Node]] = {}
        for part in self._parts(begins):
            at = self.at
            if _sends_results(part):
                at = max(self.schedule.producers.get(read, -1) + 1 for member in part for read in member.reads)
            instead.setdefault(at, []).append(bucket_node(part, None, self.cost))
        self.nodes_replayed += len(self.schedule.nodes)
        return with_merged(self.schedule, instead, {self.at}, {})

    def _parts(self, begins: frozenset[int]) -> Iterator[Sequence[Node]]:
        edges = [0, *sorted(begins), len(self.members)]
        return (self.members[low:high] for low, high in itertools.pairwise(edges))


def _sends_results(members: Sequence[Node]) -> bool:
    return not KINDS[comm_of(members[0]).collective].brings_inputs
