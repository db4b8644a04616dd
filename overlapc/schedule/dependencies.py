"""Dependences between nodes, as arrays over positions in `Schedule.nodes`.

Edges come from
- data: a reader follows the node that defines the buffer it reads;
- mutation: an access of a storage follows the last node that overwrote it, and overwriting follows every
  earlier access of any alias. A START accesses its buffers until its WAIT, so the edge begins at the WAIT;
- `after`: order that a node demands without a data dependence;
- collectives: STARTs and synchronous collectives (COMM) of one process group keep their order; a COMM node that is not
  safe (`Comm.safe`) is a barrier, which no START and no WAIT may cross.

Which of two accesses (or collectives) comes first is defined by the order in which the schedule was first built:
`replace_order` stores that schedule in `moved_from`. A pass that may change the order of collectives passes
`reorder_collectives`, and its order is then the one to keep.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from overlapc.errors import ScheduleError, unknown_name
from overlapc.schedule.model import Kind, Node, Schedule


class Why(Enum):
    """The reason of an edge; of several edges between two nodes, the smallest value is kept."""

    DATA = 0
    MUTATION = 1
    AFTER = 2
    COLLECTIVE_ORDER = 3
    BARRIER = 4


@dataclass(frozen=True, slots=True)
class Dependencies:
    """Edges between positions. `why[before, after]` is the reason of an edge, the smallest if there are several."""

    preds: Sequence[Sequence[int]]
    succs: Sequence[Sequence[int]]
    why: dict[tuple[int, int], Why]

    def edges(self) -> Iterator[tuple[int, int, Why]]:
        """Yield (before, after, why) of every edge."""
        for (before, after), why in self.why.items():
            yield before, after, why


def of(schedule: Schedule) -> Dependencies:
    """Return the dependences of a schedule, as positions in its current order. Cached with the schedule.

    O(nodes + edges). ScheduleError if `after` names a node that does not exist.
    """
    base = schedule.moved_from
    return schedule.fact(
        "dependencies", lambda: _build(schedule) if base is None else _renumber(of(base), base, schedule)
    )


def accesses(schedule: Schedule, node: Node) -> dict[str, bool]:
    """Return the roots of the storages that a node accesses, each with whether the node overwrites earlier contents."""
    touched = {schedule.root(name): False for name in (*node.reads, *node.writes)}
    for name in node.mutates:
        touched[schedule.root(name)] = True
    return touched


def _build(schedule: Schedule) -> Dependencies:
    why: dict[tuple[int, int], Why] = {}
    strongest_first = (*_data(schedule), *_mutations(schedule), *_after(schedule), *_collective_order(schedule))
    for before, after, reason in strongest_first:
        if before != after:
            why.setdefault((before, after), reason)
    return _arrays(len(schedule.nodes), why)


def _renumber(base: Dependencies, old: Schedule, new: Schedule) -> Dependencies:
    position = new.positions
    to = [position[node.name] for node in old.nodes]
    edges = {(to[before], to[after]): why for (before, after), why in base.why.items()}
    if new.collectives_moved:
        edges = {edge: why for edge, why in edges.items() if why is not Why.COLLECTIVE_ORDER}
        for before, after, why in _collective_order(new):
            if why is Why.COLLECTIVE_ORDER:
                edges.setdefault((before, after), why)
    return _arrays(len(to), edges)


def _arrays(count: int, why: dict[tuple[int, int], Why]) -> Dependencies:
    preds: list[list[int]] = [[] for _ in range(count)]
    succs: list[list[int]] = [[] for _ in range(count)]
    for before, after in why:
        preds[after].append(before)
        succs[before].append(after)
    return Dependencies(preds, succs, why)


_Edge = tuple[int, int, Why]


def _data(schedule: Schedule) -> Iterator[_Edge]:
    for at, node in enumerate(schedule.nodes):
        for name in (*node.reads, *node.mutates):
            producer = schedule.producer(name)
            if producer is not None:
                yield schedule.position(producer.name), at, Why.DATA


def _mutations(schedule: Schedule) -> Iterator[_Edge]:
    """Yield the edges of storages that a node overwrites; for all other storages, data edges suffice."""
    overwritten = {schedule.root(name) for node in schedule.nodes for name in node.mutates}
    if not overwritten:
        return
    readers: dict[str, list[int]] = {root: [] for root in overwritten}
    writer: dict[str, int] = {}
    for at, node in enumerate(schedule.nodes):
        wait = schedule.wait_of(node) if node.kind is Kind.START else None
        done = at if wait is None else schedule.position(wait.name)  # in flight until then
        for root, overwrites in accesses(schedule, node).items():
            if root not in overwritten:
                continue
            if root in writer and writer[root] != done:  # no edge from a START to its own WAIT
                yield writer[root], at, Why.MUTATION
            if overwrites:
                for reader in readers[root]:
                    yield reader, at, Why.MUTATION
                readers[root] = []
                writer[root] = done
            else:
                readers[root].append(done)


def _after(schedule: Schedule) -> Iterator[_Edge]:
    position = schedule.positions
    for at, node in enumerate(schedule.nodes):
        for name in node.after:
            if name not in position:
                raise ScheduleError(f"{node.name} comes after {name}: {unknown_name('node', name, position)}")
            yield position[name], at, Why.AFTER


def _collective_order(schedule: Schedule) -> Iterator[_Edge]:
    last_of_group: dict[str, int] = {}
    barrier: int | None = None
    since_barrier: list[int] = []
    for at, node in enumerate(schedule.nodes):
        if node.is_barrier:
            for earlier in since_barrier:
                yield earlier, at, Why.BARRIER
            if barrier is not None:
                yield barrier, at, Why.BARRIER
            barrier, since_barrier = at, []
            last_of_group.clear()
        elif node.kind in (Kind.START, Kind.WAIT, Kind.COMM):
            if barrier is not None:
                yield barrier, at, Why.BARRIER
            since_barrier.append(at)
            if node.comm is not None:  # a wait has none
                group = node.comm.group
                if group in last_of_group:
                    yield last_of_group[group], at, Why.COLLECTIVE_ORDER
                last_of_group[group] = at
