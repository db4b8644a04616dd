"""Schedules a graph that Dynamo recompiles for other sizes in the order that ranks agreed on before.

Only some ranks may get a smaller last batch: these ranks recompile, and the others do not know. So for a function whose
earlier graph was agreed on, ranks exchange data only within the process groups whose collectives have other sizes now,
such as those of tensor parallelism. On all other groups, which this rank shares with ranks that do not compile, the new
graph gets the same buckets and launches them in the same order, whatever its own estimates say. This is verified before
anything is launched; if data dependences do not allow that order, compiling fails with an error.

The order is a single one over all of these groups: on a mesh of several axes, ranks that preserved only the order
within each group could deadlock.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from overlapc.errors import CompileError
from overlapc.fx.comm.taken_out import TAKEN_OUT
from overlapc.ir.ops import Extern
from overlapc.passes.base import Context
from overlapc.passes.bucket_cost import BucketCost, bucket_node, comm_of
from overlapc.passes.merging import after_renamed
from overlapc.passes.run import Result, run_pipeline
from overlapc.planning.agreed import Agreed, Captured, Followed, Launch, Place, by_group, places_of
from overlapc.schedule import dependencies
from overlapc.schedule.collective_kinds import KINDS, equal_sizes
from overlapc.schedule.dependencies import Why
from overlapc.schedule.model import COMMUNICATION, Comm, Node, Schedule
from overlapc.schedule.verify import verify

# Passes that keep the order of launches on each group, tried in turn: raising starts may change the order across
# groups; the empty list keeps the agreed order.
_PASSES = (("raise_collectives", "sink_waits"), ("sink_waits",), ())


class OrderImpossible(CompileError):
    """Data dependences of a graph do not allow the agreed order of launches."""


class SlotsInUse(CompileError):
    """A graph has the agreed order of launches, but needs slots for copies longer than the graph that it follows."""

    def __init__(self, text: str, starts: Collection[str]) -> None:
        """starts: the collectives whose results are in slots until their last reader."""
        super().__init__(text)
        self.starts = starts


def agreed_on(schedule: Schedule, result: Result, followed: Followed[Agreed] | None = None) -> Agreed:
    """Return what later graphs of the function must follow, from the incoming `schedule` and the passes' `result`."""
    merged = {name: members for report in result.reports for name, members in report.merged.items()}
    if followed is not None:
        merged.update(_buckets(schedule, followed.agreed))

    def members_of(name: str) -> Iterator[str]:
        for member in merged.get(name, ()):
            yield from members_of(member) if member in merged else (member,)

    collectives = _collectives(schedule)
    places = places_of(collectives, named=False)
    launches, lines = [], []
    for name, comm in _collectives(result.schedule):
        members = tuple(members_of(name)) or (name,)
        launches.append((name, members))
        lines.append(_line(comm, [places[member] for member in members]))
    return Agreed(collectives, tuple(launches), tuple(lines))


def _line(comm: Comm, members: Sequence[Place]) -> str:
    """Return a launch as text that is equal on all ranks: `all_gather parameter 0 parameter 1 @dp(4) 64B`, with a
    number for a collective that serves no parameter, and for a further one of the same parameter."""
    what = " ".join(f"{param} #{number}" if number or not param else param for _, param, _, number in members)
    size = f" {comm.bytes}B" if equal_sizes(comm.collective, comm.via) else ""
    return f"{comm.carried} {what.strip()} @{comm.group}({comm.size}){size}"


def in_order(launches: Sequence[Sequence[Place]], collectives: Captured) -> Agreed | None:
    """Return an agreement on these launches of another rank, for a graph with these collectives; None if it has
    others."""
    name_at = {place: name for name, place in places_of(collectives, named=False).items()}
    launched = [place for members in launches for place in members]
    if len(launched) != len(name_at) or not name_at.keys() >= set(launched):
        return None
    named = [tuple(name_at[place] for place in members) for members in launches]
    return Agreed(collectives, tuple((_name(members), members) for members in named), ())


def _name(members: Sequence[str]) -> str:
    return members[0] if len(members) == 1 else f"{members[0]}+{len(members) - 1}"


def follow(schedule: Schedule, followed: Followed[Agreed], ctx: Context) -> Iterator[Result]:
    """Yield schedules with the agreed launches in the agreed order, the best first; none if dependences forbid it."""
    ordered = _in_order(schedule, followed.agreed, ctx)
    if ordered is None:
        return
    buckets = _buckets(schedule, followed.agreed)
    verify(ordered, "agreed order", reference=schedule, merged=buckets, may_reorder_collectives=True)
    for passes in _PASSES:
        yield run_pipeline(ordered, replace(ctx, passes=passes, reorder_collectives=False, stop_after=None))


def may_run_beside(planned: Agreed, followed: Followed[Agreed]) -> bool:
    """Whether `planned` and the graph that it follows can run on different ranks in one step.

    They can if they launch the same on all groups except those whose ranks compile together.
    """
    earlier = followed.agreed
    same = _same_groups(planned.collectives, earlier.collectives)
    apart = {comm.ranks for _, comm in (*planned.collectives, *earlier.collectives) if comm.group not in same}
    if not all(ranks and set(ranks) <= set(followed.compiling_ranks) for ranks in apart):
        return False
    return _order_on(same, planned) == _order_on(same, earlier)


def _same_groups(collectives: Captured, others: Captured) -> set[str]:
    """Return the process groups over which both graphs have the same collectives."""
    here, there = by_group(collectives), by_group(others)
    return {group for group in here if here[group] == there.get(group)}


def _order_on(groups: Collection[str], agreed: Agreed) -> list[list[Place]]:
    """Return the launches over `groups` in order: for each the places of the collectives that it launches."""
    places = places_of(agreed.collectives)
    launches = ([places[member] for member in members] for _, members in agreed.launches)
    return [launch for launch in launches if launch[0][0] in groups]


def _launches(schedule: Schedule, agreed: Agreed) -> list[Launch]:
    """Return the agreed launches over groups with the same collectives in `schedule`, with the names used there."""
    collectives = _collectives(schedule)
    same = _same_groups(collectives, agreed.collectives)
    name_at = {place: name for name, place in places_of(collectives).items()}
    places = places_of(agreed.collectives)
    found = []
    for name, members in agreed.launches:
        if places[members[0]][0] in same:
            here = tuple(name_at[places[member]] for member in members)
            found.append((name if here == members else _name(here), here))
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
    place = list(range(len(nodes)))  # position -> position of the launch that replaces the node, else the same
    rank = list(range(len(nodes)))  # position -> priority among the nodes that are ready (lowest first)
    renamed: dict[str, str] = {}
    for name, members in launches:
        at = [schedule.position(member) for member in members]
        if len(at) < 2:
            continue
        node = _bucket(name, [nodes[position] for position in at], ctx)
        if node is None:
            return None
        nodes[at[0]] = node
        rank[at[0]] = min(at) if KINDS[comm_of(node).collective].brings_inputs else max(at)
        for position, member in zip(at, members, strict=True):
            place[position] = at[0]
            renamed[member] = name
    order = _sorted(schedule, launches, place, rank)
    if order is None:
        return None
    made = tuple(after_renamed(nodes[at], renamed) for at in order)
    return Schedule(schedule.name, made, schedule.buffers, schedule.outputs, schedule.budget_bytes)


def _one_at_a_time(schedule: Schedule, launches: Sequence[Launch]) -> Iterator[tuple[int, int]]:
    """Yield pairs of positions of which the first must run before the second, so that slots of only one launch are in
    use: its waits and the copies of results out of slots come before what the next launch sends is written. In a graph
    without such copies there are no pairs."""
    taken_out = [at for at, node in enumerate(schedule.nodes) if _takes_out(node)]
    if not taken_out:
        return
    launch_of = {schedule.position(member): at for at, (_, members) in enumerate(launches) for member in members}
    start_of = {name: start for wait, start in schedule.started.items() for name in schedule.nodes[wait].writes}
    last: dict[int, list[int]] = {}  # launch -> what runs before its slots are free
    for wait, start in schedule.started.items():
        if start in launch_of:
            last.setdefault(launch_of[start], []).append(wait)
    for at in taken_out:
        for launch in {launch_of[start_of[name]] for name in schedule.nodes[at].reads if start_of[name] in launch_of}:
            last.setdefault(launch, []).append(at)
    senders: dict[int, list[int]] = {}  # launch -> nodes that write what it sends, and what only later launches send
    for at, node in enumerate(schedule.nodes):
        readers = {schedule.position(reader.name) for name in node.writes for reader in schedule.readers(name)}
        if readers and readers <= launch_of.keys():
            senders.setdefault(min(launch_of[reader] for reader in readers), []).append(at)
    for launch, (_, members) in enumerate(launches[1:], 1):
        later = [*map(schedule.position, members), *senders.get(launch, ())]
        yield from itertools.product(last.get(launch - 1, ()), later)


def _takes_out(node: Node) -> bool:
    return isinstance(node.payload, Extern) and node.payload.target is TAKEN_OUT


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
    """Return the places in topological order, agreed launches in the agreed order and all other collectives in their
    present order; None if dependences forbid it."""
    after: dict[int, set[int]] = {at: set() for at in place}
    for one, other, why in dependencies.of(schedule).edges():
        if why is Why.COLLECTIVE_ORDER:
            continue
        if place[one] == place[other]:
            return None  # one member of a launch depends on another
        after[place[one]].add(place[other])
    in_launches = {member for _, members in launches for member in members}
    in_order = [place[schedule.position(members[0])] for _, members in launches]
    rest = [place[schedule.position(name)] for name, _ in _collectives(schedule) if name not in in_launches]
    for one, other in itertools.chain(*map(itertools.pairwise, (in_order, rest))):
        after[one].add(other)
    for one, other in _one_at_a_time(schedule, launches):
        after[place[one]].add(place[other])
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
