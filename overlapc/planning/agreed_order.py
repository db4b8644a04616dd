"""A graph that Dynamo compiles again for other sizes is scheduled in the order that ranks agreed on before.

A smaller last batch may come on one rank alone: this rank compiles again, and the others know nothing of it. So ranks
do not meet about a graph of a function whose graph they agreed on already, if both need the same collectives: of the
same names, groups, kinds and sizes, in the same order. Which graph that is, each rank knows by itself. The new graph
then gets the same buckets and launches in the same order, whatever its own estimates say, which is verified before
anything is launched; where data dependences do not allow that order, ranks meet about the graph as about any other.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from overlapc.passes.base import Context
from overlapc.passes.bucket_cost import BucketCost, bucket_node, comm_of
from overlapc.passes.merging import after_renamed
from overlapc.passes.run import Result, run_pipeline
from overlapc.planning.agreed import Agreed
from overlapc.schedule import dependencies
from overlapc.schedule.collective_kinds import KINDS
from overlapc.schedule.dependencies import Why
from overlapc.schedule.model import COMMUNICATION, Comm, Node, Schedule
from overlapc.schedule.verify import verify

# What moves compute around launches whose order stays: one after the other, up to the first that keeps it.
_PASSES = (("raise_collectives", "sink_waits"), ())


def agreed_on(schedule: Schedule, result: Result, lines: Sequence[str]) -> Agreed:
    """What `result` made of `schedule`, to be followed."""
    merged = {name: members for report in result.reports for name, members in report.merged.items()}

    def members_of(name: str) -> Iterator[str]:
        for member in merged.get(name, ()):
            yield from members_of(member) if member in merged else (member,)

    launches = ((name, tuple(members_of(name)) or (name,)) for name, _ in _collectives(result.schedule))
    return Agreed(_collectives(schedule), tuple(launches), tuple(lines))


def follow(schedule: Schedule, agreed: Agreed, ctx: Context) -> Iterator[Result]:
    """Schedules of the same launches in the agreed order, the best first; none where there is no such order."""
    ordered = _in_order(schedule, agreed, ctx)
    if ordered is None:
        return
    merged = {name: members for name, members in agreed.launches if len(members) > 1}
    verify(ordered, "agreed order", reference=schedule, merged=merged, may_reorder_collectives=True)
    for passes in _PASSES:
        yield run_pipeline(ordered, replace(ctx, passes=passes, reorder_collectives=False, stop_after=None))


def _collectives(schedule: Schedule) -> tuple[tuple[str, Comm], ...]:
    return tuple(
        (node.name, node.comm) for node in schedule.nodes if node.kind in COMMUNICATION and node.comm is not None
    )


def _in_order(schedule: Schedule, agreed: Agreed, ctx: Context) -> Schedule | None:
    if _collectives(schedule) != agreed.collectives:
        return None
    nodes = list(schedule.nodes)
    place = list(range(len(nodes)))  # of a node, or of the launch that it is part of: a position
    rank = list(range(len(nodes)))  # by which a place is chosen among those that may be next
    renamed: dict[str, str] = {}
    for name, members in agreed.launches:
        at = [schedule.position(member) for member in members]
        if len(at) < 2:
            continue
        node = _bucket(name, [nodes[each] for each in at], ctx)
        if node is None:
            return None
        nodes[at[0]] = node
        rank[at[0]] = min(at) if KINDS[comm_of(node).collective].brings_inputs else max(at)
        for each, member in zip(at, members, strict=True):
            place[each] = at[0]
            renamed[member] = name
    order = _sorted(schedule, agreed, place, rank)
    if order is None:
        return None
    made = tuple(after_renamed(nodes[at], renamed) for at in order)
    return Schedule(schedule.name, made, schedule.buffers, schedule.outputs, schedule.budget_bytes)


def _bucket(name: str, members: Sequence[Node], ctx: Context) -> Node | None:
    payload = None
    if any(member.payload is not None for member in members):
        assert ctx.merge_payloads is not None
        payload = ctx.merge_payloads([member.payload for member in members])
        if isinstance(payload, str):
            return None
    return replace(bucket_node(members, payload, BucketCost(ctx, members[0])), name=name)


def _sorted(schedule: Schedule, agreed: Agreed, place: Sequence[int], rank: Sequence[int]) -> list[int] | None:
    """Places in an order with the agreed launches; None if there is none."""
    after: dict[int, set[int]] = {at: set() for at in place}
    for one, other, why in dependencies.of(schedule).edges():
        if why is Why.COLLECTIVE_ORDER:
            continue
        if place[one] == place[other]:
            return None  # part of a launch needs another part of it
        after[place[one]].add(place[other])
    launches = [place[schedule.position(members[0])] for _, members in agreed.launches]
    for one, other in itertools.pairwise(launches):
        after[one].add(other)
    waiting = dict.fromkeys(after, 0)
    for others in after.values():
        for at in others:
            waiting[at] += 1
    ready = [(rank[at], at) for at, count in waiting.items() if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, at = heapq.heappop(ready)
        order.append(at)
        for other in after[at]:
            waiting[other] -= 1
            if not waiting[other]:
                heapq.heappush(ready, (rank[other], other))
    return order if len(order) == len(after) else None
