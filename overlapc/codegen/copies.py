"""A schedule's collectives by copies: their slots in each group's pool, and what generated code calls for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from overlapc.errors import ScheduleError
from overlapc.runtime.copies.commands import ALIGNMENT_BYTES
from overlapc.runtime.copies.layout import Event, Layout, check, place
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


@dataclass(frozen=True)
class Copying:
    """What a schedule's copies do, by group: starts with their forms, and starts and releases in order."""

    starts: Mapping[str, Sequence[tuple[Node, Form]]]
    events: Mapping[str, Sequence[Event]]
    roots: Mapping[str, Sequence[str]]  # buffers that a start brings

    def laid_out(self) -> dict[str, Layout]:
        """A layout for each group. The same on all ranks, because the order of collectives and sizes of buffers are."""
        found = {group: place(events) for group, events in self.events.items()}
        broken = self.broken(found)
        if broken is not None:
            raise ScheduleError(f"copies {broken}")
        return found

    def broken(self, layouts: Mapping[str, Layout]) -> str | None:
        """Why the schedule cannot go by these layouts; None if it can."""
        if layouts.keys() != self.events.keys():
            return "are of other groups"
        reasons = {group: check(events, layouts[group]) for group, events in self.events.items()}
        return next((f"@{group}: {reason}" for group, reason in reasons.items() if reason is not None), None)

    def wanted(self, layouts: Mapping[str, Layout], groups_by_name: Mapping[str, str]) -> list[Wanted]:
        """What these need of each group's pool. groups_by_name: `Comm.group` -> torch's name of it."""
        found = []
        for group in sorted(layouts):
            comm, layout = self.starts[group][0][0].comm, layouts[group]
            assert comm is not None
            found.append(Wanted(groups_by_name[group], group, comm.ranks, layout.bytes, str(layout)))
        return found

    def on(self, layouts: Mapping[str, Layout], pools: Mapping[str, Pool]) -> dict[str, Copied]:
        """By start, how generated code runs it."""
        found: dict[str, Copied] = {}
        for group, nodes in self.starts.items():
            copies = GraphCopies(pools[group], layouts[group].slots, [form for _, form in nodes])
            for index, (node, form) in enumerate(nodes):
                held = frozenset(self.roots[node.name]) if form.in_pool else frozenset()
                found[node.name] = Copied(copies, index, held)
        return found


def copying(schedule: Schedule) -> Copying:
    """What goes by copies."""
    events: dict[str, list[Event]] = {}
    starts: dict[str, list[tuple[Node, Form]]] = {}
    roots: dict[str, tuple[str, ...]] = {}
    forms = forms_of(schedule)
    open_: dict[str, tuple[str, int]] = {}  # buffer in a pool -> its group and collective
    left: dict[tuple[str, int], int] = {}  # how many such buffers have yet to die
    for node, frees in zip(schedule.nodes, analyze(schedule).frees, strict=True):
        form = forms.get(node.name)
        if form is not None:
            group = node.group
            of_group, nodes = events.setdefault(group, []), starts.setdefault(group, [])
            index = len(nodes)
            nodes.append((node, form))
            of_group.append(Event(index, slot_bytes(node, form)))
            roots[node.name] = tuple(map(schedule.root, node.writes))
            if form.in_pool:
                open_.update((root, (group, index)) for root in roots[node.name])
                left[group, index] = len(roots[node.name])
            else:
                of_group.append(Event(index))  # the queue itself is done with it before the next start
        for root in frees:
            if root in open_:
                group, index = open_.pop(root)
                left[group, index] -= 1
                if not left[group, index]:
                    events[group].append(Event(index))
    assert not open_, "what lies in a pool dies in the graph"
    return Copying(starts, events, roots)


def forms_of(schedule: Schedule) -> dict[str, Form]:
    """By start, how copies do it: in the pool, unless what it brings outlives the graph."""
    dying = analyze(schedule).last_touch
    found: dict[str, Form] = {}
    for node in schedule.starts():
        if node.comm is not None and node.comm.via == COPY:
            inside = all(schedule.root(name) in dying for name in node.writes)
            if node.comm.collective == EXCHANGE:
                found[node.name] = Form.EXCHANGED if inside else Form.TAKEN_OUT
            else:
                found[node.name] = Form.GATHERED if inside else Form.PULLED
    return found


def outside_pools(schedule: Schedule) -> Schedule:
    """`schedule` with nothing in what lies in pools, which are there all the time."""
    forms = forms_of(schedule)
    held = {
        name for node in schedule.starts() if node.name in forms and forms[node.name].in_pool for name in node.writes
    }
    buffers = {name: replace(each, bytes=0) if name in held else each for name, each in schedule.buffers.items()}
    return replace(schedule, buffers=buffers, moved_from=None)


def peak_with_pools(schedule: Schedule) -> int:
    """Peak bytes with what ranks share for copies, which is there all the time."""
    layouts = copying(schedule).laid_out()
    return analyze(outside_pools(schedule)).peak_bytes + sum(layout.bytes for layout in layouts.values())


def slot_bytes(node: Node, form: Form) -> int:
    """Room for what a start has in the pool: its results, or the shards that are pulled from there."""
    assert node.comm is not None
    moved = node.comm.bytes
    share = -(-moved // node.comm.size) if form is Form.PULLED else moved
    return share + len(node.writes) * ALIGNMENT_BYTES
