"""A schedule's collectives by copies: their slots in each group's pool, and what generated code calls for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from overlapc.errors import ScheduleError
from overlapc.runtime.copies.commands import ALIGNMENT_BYTES
from overlapc.runtime.copies.layout import Event, check, place
from overlapc.runtime.copies.pool import GraphCopies, Pool, Wanted
from overlapc.schedule.collectives import COPY
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Kind, Node, Schedule

EXCHANGE = "all_to_all"


@dataclass(frozen=True, slots=True)
class Copied:
    """One collective: the `index`-th of the graph on its pool."""

    copies: GraphCopies
    index: int
    held: frozenset[str]  # buffers in the pool: when the last has been read, the collective is released


def copied(
    schedule: Schedule, groups_by_name: Mapping[str, str]
) -> tuple[Callable[[Mapping[str, Pool]], dict[str, Copied]], list[Wanted]]:
    """(from each group's pool, how generated code runs each start that goes by copies; what these pools have to hold)

    groups_by_name: `Comm.group` -> torch's name of it. The same on all ranks, because the order of collectives and
    sizes of buffers are.
    """
    groups: dict[str, list[Event]] = {}
    starts: dict[str, list[Node]] = {}
    open_: dict[str, tuple[str, int]] = {}  # buffer in a pool -> its group and collective
    left: dict[tuple[str, int], int] = {}  # how many such buffers have yet to die
    for node, frees in zip(schedule.nodes, analyze(schedule).frees, strict=True):
        if node.kind is Kind.START and node.comm is not None and node.comm.via == COPY:
            group = node.comm.group
            events, nodes = groups.setdefault(group, []), starts.setdefault(group, [])
            index = len(nodes)
            nodes.append(node)
            events.append(Event(index, slot_bytes(node)))
            if node.comm.collective == EXCHANGE:
                open_.update((name, (group, index)) for name in node.writes)
                left[group, index] = len(node.writes)
            else:
                events.append(Event(index))  # the queue itself is done with a gather before the next start
        for root in frees:
            if root in open_:
                group, index = open_.pop(root)
                left[group, index] -= 1
                if not left[group, index]:
                    groups[group].append(Event(index))
    if open_:
        raise ScheduleError(f"{schedule.name}: {next(iter(open_))} leaves the graph in memory that ranks share")
    slots = {group: place(events) for group, events in groups.items()}
    for group, events in groups.items():
        broken = check(events, slots[group][0])
        if broken is not None:
            raise ScheduleError(f"{schedule.name}: copies @{group}: {broken}")

    def on(pools: Mapping[str, Pool]) -> dict[str, Copied]:
        found: dict[str, Copied] = {}
        for group, nodes in starts.items():
            kinds = [node.comm.collective for node in nodes if node.comm is not None]
            copies = GraphCopies(pools[group], slots[group][0], kinds)
            for index, node in enumerate(nodes):
                held = frozenset(node.writes) if kinds[index] == EXCHANGE else frozenset()
                found[node.name] = Copied(copies, index, held)
        return found

    ranks = {group: nodes[0].comm.ranks for group, nodes in starts.items() if nodes[0].comm is not None}
    return on, [Wanted(groups_by_name[group], group, ranks[group], slots[group][1]) for group in sorted(groups)]


def outside_pools(schedule: Schedule) -> Schedule:
    """`schedule` with nothing in what exchanges bring: that lies in pools, which are there all the time."""
    held = {
        name
        for node in schedule.starts()
        if node.comm is not None and (node.comm.via, node.comm.collective) == (COPY, EXCHANGE)
        for name in node.writes
    }
    buffers = {name: replace(each, bytes=0) if name in held else each for name, each in schedule.buffers.items()}
    return replace(schedule, buffers=buffers, moved_from=None)


def slot_bytes(node: Node) -> int:
    """Room for what a start has in the pool: the shards of a gather, all parts of an exchange."""
    assert node.comm is not None
    moved = node.comm.bytes
    share = moved if node.comm.collective == EXCHANGE else -(-moved // node.comm.size)
    return share + len(node.writes) * ALIGNMENT_BYTES
