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
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import partial

from overlapc.estimators.simulator.machine import NodeCosts, costs_of
from overlapc.estimators.timeline import replay
from overlapc.passes.base import Context
from overlapc.passes.bucket_cost import BucketCost, bucket_node, comm_of
from overlapc.passes.plan_overlap import plan_overlap
from overlapc.passes.reasons import Reason
from overlapc.passes.sink_waits import sink_waits
from overlapc.schedule.collective_kinds import KINDS
from overlapc.schedule.late import late_node
from overlapc.schedule.model import Kind, Node, Schedule

# A collective that is exposed for less than this share of the step is left alone.
WORTH_IT = 0.0005
# Nodes before and after those of a bucket that are replayed with it: about one layer.
AROUND = 64
# At most this many places for a cut are tried in a bucket, evenly spaced.
MOST_PLACES = 16
# All replays for one schedule together may replay this many nodes: a few tenths of a second.
MOST_NODES = 200_000


def in_order(schedule: Schedule, ctx: Context) -> Schedule:
    """Return `schedule` in the order in which buckets are cut and compared, by the default passes that place most.

    The walks under peak memory would take most of the time, and no cut is better for them.
    """
    for rule in (plan_overlap, sink_waits):
        schedule, _ = schedule.fact(rule.__name__, partial(rule, schedule, ctx), of=(rule, ctx))  # see `runner._call`
    return schedule


def short_of_memory(schedule: Schedule, ctx: Context) -> bool:
    """Whether `in_order` starts a collective late because memory has no room for it."""
    _, report = schedule.fact("plan_overlap", partial(plan_overlap, schedule, ctx), of=(plan_overlap, ctx))
    return any(report.limits.get(start.name) is Reason.MEMORY for start in schedule.starts())


def cuts(ordered: Schedule, members: Mapping[str, Sequence[Node]], ctx: Context) -> frozenset[str]:
    """Return the members that should begin a new bucket. members: name of a bucket in `ordered` -> its members."""
    firsts: set[str] = set()
    timeline = ctx.timeline(ordered)
    exposed = {name: timeline.collectives[name].exposed_ns for name in members}
    nodes_left = MOST_NODES
    for name in sorted(members, key=lambda name: -exposed[name]):
        if exposed[name] < WORTH_IT * timeline.step_ns:
            break
        window = _Window(ordered, name, members[name], ctx)
        begins = window.best_cuts(nodes_left)
        nodes_left -= window.nodes_replayed
        firsts.update(members[name][at].name for at in begins)
    return frozenset(firsts)


class _Window:
    """A bucket and the nodes around it. Nodes are positions in `ordered`."""

    def __init__(self, ordered: Schedule, name: str, members: Sequence[Node], ctx: Context) -> None:
        """Take the nodes from the first producer of the bucket's inputs to its last wait, and a layer on both sides,
        without other collectives whose waits come later: a replay would wait for them at its end."""
        self.members, self.ctx, self.cost = members, ctx, BucketCost(ctx, members[0])
        self.bucket, waits_of = ordered.position(name), ordered.waits_of
        made = [[ordered.producers.get(read, -1) for read in member.reads] for member in members]
        if KINDS[comm_of(members[0]).collective].brings_inputs:
            made = [[self.bucket - 1]] * len(members)  # cut gathers start where their bucket did
        first = min((at for makers in made for at in makers if at >= 0), default=self.bucket)
        last = waits_of.get(self.bucket, [self.bucket])[-1]
        low, high = max(0, first - AROUND), min(len(ordered.nodes), last + 1 + AROUND)
        late = (at for at in range(low, high) if waits_of.get(at, [high])[0] >= high)
        dropped = {at for at in late if ordered.nodes[at].kind is Kind.START and at != self.bucket}
        self.places = [at for at in range(low, high) if at not in dropped]
        self.ready = [self.places[bisect_left(self.places, 1 + max(makers))] for makers in made]  # by member
        self.started = {at: ordered.started[at] for at in self.places if at in ordered.started}
        written_by = {ordered.root(made): index for index, member in enumerate(members) for made in member.writes}
        waits = [at for at, start in self.started.items() if start == self.bucket]
        roots = {at: map(ordered.root, ordered.nodes[at].reads) for at in waits}
        self.awaits = {at: next(written_by[root] for root in roots[at] if root in written_by) for at in waits}
        clocks = [ordered] if ctx.overlap_margin == 1 else [ordered, ctx.late(ordered)]
        self.clocks = [costs_of(clock, ctx.profile) for clock in clocks]
        self.nodes_replayed = 0
        self.parts: dict[tuple[int, int], tuple[NodeCosts, ...]] = {}  # members from, to -> their bucket, by clock

    def best_cuts(self, most_nodes: int) -> frozenset[int]:
        """Return the indices of members that should begin a new bucket: the best cut is added until none helps."""
        begins: frozenset[int] = frozenset()
        best = self._cost(begins)
        step = -(-len(self.members) // MOST_PLACES)
        while True:
            tried = []
            for at in range(step, len(self.members), step):
                if at not in begins and self.nodes_replayed < most_nodes:
                    tried.append((self._cost(begins | {at}), begins | {at}))
                    self.nodes_replayed += len(self.places)
            if not tried or min(tried, key=lambda cut: cut[0])[0] >= best:
                return begins
            best, begins = min(tried, key=lambda cut: cut[0])

    def _cost(self, begins: frozenset[int]) -> tuple[float, float]:
        """Return `judge.cost` with the bucket cut. A part starts where the last of its members can."""
        cut = list(itertools.pairwise((0, *sorted(begins), len(self.members))))
        inserted: dict[int, list[int]] = {}
        part_of: list[int] = []  # by member; part i is node -1 - i
        for number, edges in enumerate(cut):
            at = max(self.ready[slice(*edges)]) if begins else self.bucket
            inserted.setdefault(at, []).append(-1 - number)
            part_of += [-1 - number] * (edges[1] - edges[0])
        order: list[int] = []
        for at in self.places:
            order += (*inserted.get(at, ()), at) if at != self.bucket else inserted.get(at, ())
        started = {**self.started, **{wait: part_of[member] for wait, member in self.awaits.items()}}
        parts = zip(*(self._part(edges) for edges in cut), strict=True)  # by clock
        clocks = (costs.of_order(order, started, part) for costs, part in zip(self.clocks, parts, strict=True))
        replays = [replay(clock, self.ctx.cache_dir) for clock in clocks]
        return replays[0].step_ns + replays[-1].step_ns, sum(replays[0].exposed_ns)

    def _part(self, edges: tuple[int, int]) -> tuple[NodeCosts, ...]:
        if edges not in self.parts:
            node = bucket_node(self.members[slice(*edges)], None, self.cost)
            late = [clock.of_node(late_node(node, self.ctx.overlap_margin)) for clock in self.clocks[1:]]
            self.parts[edges] = self.clocks[0].of_node(node), *late
        return self.parts[edges]
