"""A graph that Dynamo compiles again for other sizes is scheduled in the order that ranks agreed on before.

A smaller last batch may come on some ranks alone: these compile again, and the others know nothing of it. So ranks meet
about a graph of a function whose graph they agreed on already only within the process groups whose collectives have
other sizes now, such as those of tensor parallelism. On all other groups, which are shared with ranks that do not
compile, the new graph gets the same buckets and launches them in the same order, whatever its own estimates say. That
is verified before anything is launched; where data dependences do not allow it, compiling ends with an error.

The order is one over all of these groups: on a mesh of several axes, ranks that kept only the order within each group
could wait for each other in a circle.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from overlapc.passes.base import Context
from overlapc.passes.bucket_cost import BucketCost, bucket_node, comm_of
from overlapc.passes.merging import after_renamed
from overlapc.passes.run import Result, run_pipeline
from overlapc.planning.agreed import Agreed, Captured, Followed, Launch, by_group
from overlapc.schedule import dependencies
from overlapc.schedule.collective_kinds import KINDS
from overlapc.schedule.dependencies import Why
from overlapc.schedule.model import COMMUNICATION, Comm, Node, Schedule
from overlapc.schedule.verify import verify

# What moves compute around launches whose order stays: one after the other, up to the first that keeps it.
_PASSES = (("raise_collectives", "sink_waits"), ())


def agreed_on(
    schedule: Schedule, result: Result, lines: Sequence[str], followed: Followed[Agreed] | None = None
) -> Agreed:
    """What `result` made of `schedule`, to be followed."""
    merged = {name: members for report in result.reports for name, members in report.merged.items()}
    if followed is not None:
        merged.update(_buckets(schedule, followed.agreed))

    def members_of(name: str) -> Iterator[str]:
        for member in merged.get(name, ()):
            yield from members_of(member) if member in merged else (member,)

    launches = ((name, tuple(members_of(name)) or (name,)) for name, _ in _collectives(result.schedule))
    return Agreed(_collectives(schedule), tuple(launches), tuple(lines))


def follow(schedule: Schedule, followed: Followed[Agreed], ctx: Context) -> Iterator[Result]:
    """Schedules of the same launches in the agreed order, the best first; none where there is no such order."""
    ordered = _in_order(schedule, followed.agreed, ctx)
    if ordered is None:
        return
    buckets = _buckets(schedule, followed.agreed)
    verify(ordered, "agreed order", reference=schedule, merged=buckets, may_reorder_collectives=True)
    for passes in _PASSES:
        yield run_pipeline(ordered, replace(ctx, passes=passes, reorder_collectives=False, stop_after=None))


def goes_by(planned: Agreed, followed: Followed[Agreed]) -> bool:
    """Whether `planned` and the graph that it follows may run on different ranks in one step.

    Ranks of groups that do not launch the same have to compile together.
    """
    earlier = followed.agreed
    same = _same_groups(planned.collectives, earlier.collectives)
    apart = {comm.ranks for _, comm in (*planned.collectives, *earlier.collectives) if comm.group not in same}
    if not all(ranks and set(ranks) <= set(followed.meets) for ranks in apart):
        return False
    return _order_on(same, planned) == _order_on(same, earlier)


def _same_groups(collectives: Captured, others: Captured) -> set[str]:
    """The groups over which two graphs do the same."""
    here, there = by_group(collectives), by_group(others)
    return {group for group in here if here[group] == there.get(group)}


def _order_on(groups: Collection[str], agreed: Agreed) -> list[list[tuple[str, int]]]:
    """The launches over some groups in order, of each its group and which of the group's collectives it stands for."""
    places = _places(agreed.collectives)
    launches = ([places[member] for member in members] for _, members in agreed.launches)
    return [launch for launch in launches if launch[0][0] in groups]


def _places(collectives: Captured) -> dict[str, tuple[str, int]]:
    """Of each collective, by name: its group, and its number among the collectives of that group."""
    numbers: dict[str, int] = {}
    found = {}
    for name, comm in collectives:
        number = numbers[comm.group] = numbers.get(comm.group, -1) + 1
        found[name] = comm.group, number
    return found


def _launches(schedule: Schedule, agreed: Agreed) -> list[Launch]:
    """The agreed launches over groups that do the same in `schedule`, with the names of its collectives."""
    collectives = _collectives(schedule)
    same = _same_groups(collectives, agreed.collectives)
    name_at = {place: name for name, place in _places(collectives).items()}
    places = _places(agreed.collectives)
    found = []
    for name, members in agreed.launches:
        if places[members[0]][0] in same:
            here = tuple(name_at[places[member]] for member in members)
            found.append((name if here == members else f"{here[0]}+{len(here) - 1}", here))
    return found


def _collectives(schedule: Schedule) -> tuple[tuple[str, Comm], ...]:
    return tuple(
        (node.name, node.comm) for node in schedule.nodes if node.kind in COMMUNICATION and node.comm is not None
    )


def _buckets(schedule: Schedule, agreed: Agreed) -> dict[str, tuple[str, ...]]:
    return {name: members for name, members in _launches(schedule, agreed) if len(members) > 1}


def _in_order(schedule: Schedule, agreed: Agreed, ctx: Context) -> Schedule | None:
    launches = _launches(schedule, agreed)
    nodes = list(schedule.nodes)
    place = list(range(len(nodes)))  # of a node, or of the launch that it is part of: a position
    rank = list(range(len(nodes)))  # by which a place is chosen among those that may be next
    renamed: dict[str, str] = {}
    for name, members in launches:
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
    order = _sorted(schedule, launches, place, rank)
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


def _sorted(
    schedule: Schedule, launches: Sequence[Launch], place: Sequence[int], rank: Sequence[int]
) -> list[int] | None:
    """Places in an order with the agreed launches, and others in the order that they have; None if there is none."""
    after: dict[int, set[int]] = {at: set() for at in place}
    for one, other, why in dependencies.of(schedule).edges():
        if why is Why.COLLECTIVE_ORDER:
            continue
        if place[one] == place[other]:
            return None  # part of a launch needs another part of it
        after[place[one]].add(place[other])
    in_launches = {member for _, members in launches for member in members}
    in_order = [place[schedule.position(members[0])] for _, members in launches]
    rest = [place[schedule.position(name)] for name, _ in _collectives(schedule) if name not in in_launches]
    for chain in (in_order, rest):
        for one, other in itertools.pairwise(chain):
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
