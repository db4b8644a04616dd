"""A schedule's collectives by copies: their slots in each group's pool, and what generated code calls for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from overlapc.errors import ScheduleError
from overlapc.runtime.copies.commands import ALIGNMENT_BYTES
from overlapc.runtime.copies.layout import Event, check, place
from overlapc.runtime.copies.pool import Form, GraphCopies, Pool, Wanted
from overlapc.schedule.collectives import COPY
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Node, Schedule

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
    starts: dict[str, list[tuple[Node, Form]]] = {}
    forms = forms_of(schedule)
    open_: dict[str, tuple[str, int]] = {}  # buffer in a pool -> its group and collective
    left: dict[tuple[str, int], int] = {}  # how many such buffers have yet to die
    for node, frees in zip(schedule.nodes, analyze(schedule).frees, strict=True):
        form = forms.get(node.name)
        if form is not None:
            group = node.group
            events, nodes = groups.setdefault(group, []), starts.setdefault(group, [])
            index = len(nodes)
            nodes.append((node, form))
            events.append(Event(index, slot_bytes(node, form)))
            if form is Form.PULLED:
                events.append(Event(index))  # the queue itself is done with it before the next start
            else:
                open_.update((schedule.root(name), (group, index)) for name in node.writes)
                left[group, index] = len(node.writes)
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
            releases = sum(not event.is_start for event in groups[group])
            copies = GraphCopies(pools[group], slots[group][0], [form for _, form in nodes], releases)
            for index, (node, form) in enumerate(nodes):
                held = frozenset() if form is Form.PULLED else frozenset(map(schedule.root, node.writes))
                found[node.name] = Copied(copies, index, held)
        return found

    ranks = {group: nodes[0][0].comm.ranks for group, nodes in starts.items() if nodes[0][0].comm is not None}
    return on, [
        Wanted(groups_by_name[group], group, ranks[group], slots[group][1], str(slots[group][0]))
        for group in sorted(groups)
    ]


def forms_of(schedule: Schedule) -> dict[str, Form]:
    """By start, how copies do it: in the pool, unless what it brings outlives the graph."""
    dying = analyze(schedule).last_touch
    found: dict[str, Form] = {}
    for node in schedule.starts():
        if node.comm is not None and node.comm.via == COPY:
            if node.comm.collective == EXCHANGE:
                found[node.name] = Form.EXCHANGED
            else:
                inside = all(schedule.root(name) in dying for name in node.writes)
                found[node.name] = Form.GATHERED if inside else Form.PULLED
    return found


def outside_pools(schedule: Schedule) -> Schedule:
    """`schedule` with nothing in what lies in pools, which are there all the time."""
    forms = forms_of(schedule)
    held = {
        name
        for node in schedule.starts()
        if forms.get(node.name, Form.PULLED) is not Form.PULLED
        for name in node.writes
    }
    buffers = {name: replace(each, bytes=0) if name in held else each for name, each in schedule.buffers.items()}
    return replace(schedule, buffers=buffers, moved_from=None)


def slot_bytes(node: Node, form: Form) -> int:
    """Room for what a start has in the pool: its results, or the shards that are pulled from there."""
    assert node.comm is not None
    moved = node.comm.bytes
    share = -(-moved // node.comm.size) if form is Form.PULLED else moved
    return share + len(node.writes) * ALIGNMENT_BYTES
