"""Find where cutting buckets makes the step shorter, in the order that the passes after `bucket` lead to.

    a, b = all_gather(p, q) @dp node=a+1 : 20us; u = wait(a); x = kernel(u) : 30us; v = wait(b); y = kernel(x, v)
 -> a = all_gather(p) @dp : 11us; b = all_gather(q) @dp : 11us; u = wait(a); x = kernel(u) : 30us; v = wait(b); ...

A bucket that compute hides is best left whole: one latency, and the ranks synchronize once. But no compute hides the
first gathers of a step and its last reductions: cut, they let compute begin with the first tensors, or send the first
gradients while the last are computed. Which buckets are exposed depends on the order, so the merged schedule is first
ordered by the default passes (milliseconds, without the search). Each exposed bucket is then cut at the best place, as
long as a replay of the nodes around it becomes shorter. All these cuts together are accepted if the resulting step,
ordered again, is shorter; then the procedure repeats for the collectives that are exposed now.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

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
# Nodes before and after those of a bucket that are replayed with it: about one layer.
AROUND = 64
# At most this many places for a cut are tried in a bucket, evenly spaced.
MOST_PLACES = 16
# All replays for one schedule together may replay this many nodes: a few tenths of a second.
MOST_NODES = 200_000


def in_order(schedule: Schedule, ctx: Context) -> Schedule:
    """Return `schedule` in the order from which the search of the default passes begins."""
    for rule in (plan_overlap, raise_under_memory, sink_under_memory, sink_waits):
        schedule, _ = schedule.fact(rule.__name__, partial(rule, schedule, ctx), of=(rule, ctx))  # see `runner._call`
    return schedule


def cuts(ordered: Schedule, members: Mapping[str, Sequence[Node]], ctx: Context) -> frozenset[str]:
    """Return the members that should begin a new bucket. members: name of a bucket in `ordered` -> its members."""
    firsts: set[str] = set()
    timeline = ctx.timeline(ordered)
    exposed = {name: timeline.collectives[name].exposed_ns for name in members}
    nodes_left = MOST_NODES
    for name in sorted(members, key=lambda name: -exposed[name]):
        if exposed[name] < WORTH_IT * timeline.step_ns:
            break
        window = _Window.of(ordered, name, members[name], ctx)
        begins = window.best_cuts(nodes_left)
        nodes_left -= window.nodes_replayed
        firsts.update(members[name][at].name for at in begins)
    return frozenset(firsts)


@dataclass
class _Window:
    """A bucket and the nodes around it, as a schedule of its own."""

    schedule: Schedule
    at: int  # position of the bucket
    members: Sequence[Node]
    sends_results: bool  # whether the collectives are reductions, not gathers
    ctx: Context
    cost: BucketCost
    nodes_replayed: int = 0
    parts: dict[tuple[int, int], Node] = field(default_factory=dict)  # the bucket of members from one to another

    @classmethod
    def of(cls, ordered: Schedule, name: str, members: Sequence[Node], ctx: Context) -> _Window:
        """Take the nodes from the first producer of the bucket's inputs to its last wait, and a layer on both sides,
        without collectives whose waits come later: a replay would wait for them at its end."""
        waits = ordered.waits_of
        at, sends_results = ordered.position(name), not KINDS[comm_of(members[0]).collective].brings_inputs
        makers = (ordered.producers.get(read) for member in members for read in member.reads)
        first = min((maker for maker in makers if maker is not None), default=at) if sends_results else at
        low, high = max(0, first - AROUND), min(len(ordered.nodes), waits.get(at, [at])[-1] + 1 + AROUND)
        around = enumerate(ordered.nodes[low:high], low)
        nodes = tuple(node for p, node in around if node.kind is not Kind.START or waits.get(p, [high])[0] < high)
        buffers: dict[str, Buffer] = {}  # not those of the whole graph: its inputs would count as host time
        for used in (used for node in nodes for used in (*node.reads, *node.writes)):
            alias: str | None = used
            while alias is not None and alias not in buffers:
                buffers[alias] = ordered.buffers[alias]
                alias = buffers[alias].alias_of
        window = Schedule(ordered.name, nodes, buffers, like=ordered)
        return cls(window, window.position(name), members, sends_results, ctx, BucketCost(ctx, members[0]))

    def best_cuts(self, most_nodes: int) -> frozenset[int]:
        """Return the indices of members that should begin a new bucket: the best cut is added until none helps."""
        begins: frozenset[int] = frozenset()
        best = cost(self.schedule, self.ctx)
        step = -(-len(self.members) // MOST_PLACES)
        while True:
            tried = []
            for at in range(step, len(self.members), step):
                if at not in begins and self.nodes_replayed < most_nodes:
                    tried.append((cost(self._cut(begins | {at}), self.ctx), begins | {at}))
            if not tried or min(tried, key=lambda cut: cut[0])[0] >= best:
                return begins
            best, begins = min(tried, key=lambda cut: cut[0])

    def _cut(self, begins: frozenset[int]) -> Schedule:
        """Cut the bucket. Gathers start where it did, in sequence; reductions where their last gradient is made."""
        inserted: dict[int, list[Node]] = {}
        for edges in itertools.pairwise((0, *sorted(begins), len(self.members))):
            part, at = self.members[slice(*edges)], self.at
            if self.sends_results:
                at = max(self.schedule.producers.get(read, -1) + 1 for member in part for read in member.reads)
            node = self.parts[edges] = self.parts.get(edges) or bucket_node(part, None, self.cost)
            inserted.setdefault(at, []).append(node)
        self.nodes_replayed += len(self.schedule.nodes)
        return with_merged(self.schedule, inserted, {self.at}, {})
