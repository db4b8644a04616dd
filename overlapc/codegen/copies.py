"""Collectives of a schedule that run by copies: their slots in each group's pool, and functions for generated code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from overlapc.errors import ScheduleError
from overlapc.fx.comm.exchange import EXCHANGE, blocks_of
from overlapc.ir.ops import Start as StartOp
from overlapc.runtime.copies.layout import Event, Layout, Release, Start, Take, check, place
from overlapc.runtime.copies.pool import Form, GraphCopies, Pool, StoredCopies, Wanted
from overlapc.schedule.collective_kinds import COPY
from overlapc.schedule.memory import analyze
from overlapc.schedule.model import Node, Schedule
from overlapc.schedule.pools import pooled

ALL_TO_ALL = "all_to_all"


@dataclass(frozen=True, slots=True)
class Copied:
    """One collective that runs by copies: number `index` of the graph's collectives on its pool."""

    copies: GraphCopies
    index: int
    held: frozenset[str]  # its result buffers in the pool; the collective is released after the last read of them
    shards: Mapping[str, int]  # input buffer that a kernel writes directly into the pool -> index among the tensors


@dataclass
class _GroupCopies:
    """Collectives by copies over one group: their starts and forms, and the events that determine their slots."""

    starts: list[tuple[Node, Form]] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    tensors: dict[str, int] = field(default_factory=dict)  # root buffer -> its number in `events`


@dataclass(frozen=True)
class Copying:
    """All collectives by copies of a schedule, by process group."""

    schedule: Schedule
    groups: Mapping[str, _GroupCopies]

    @property
    def starts(self) -> int:
        """Number of collectives that run by copies."""
        return sum(len(of_group.starts) for of_group in self.groups.values())

    def ranks(self, group: str) -> tuple[int, ...]:
        """Return the ranks of `group`, in order."""
        comm = self.groups[group].starts[0][0].comm
        assert comm is not None
        return comm.ranks

    def laid_out(self) -> dict[str, Layout]:
        """Return a pool layout for each group. Ranks may compute different layouts; `layout.common` merges them."""
        found = {group: place(of_group.events) for group, of_group in self.groups.items()}
        broken = self.broken(found)
        if broken is not None:
            raise ScheduleError(f"copies {broken}")
        return found

    def broken(self, layouts: Mapping[str, Layout]) -> str | None:
        """Return why the schedule cannot use these pool layouts, or None if it can."""
        if layouts.keys() != self.groups.keys():
            return "are for other process groups"
        reasons = {group: check(of_group.events, layouts[group]) for group, of_group in self.groups.items()}
        return next((f"@{group}: {reason}" for group, reason in reasons.items() if reason is not None), None)

    def wanted(self, layouts: Mapping[str, Layout], groups_by_name: Mapping[str, str]) -> list[Wanted]:
        """Return the pool that each group needs for `layouts`. groups_by_name: `Comm.group` -> torch's group name."""
        found = []
        for group in sorted(layouts):
            layout = layouts[group]
            found.append(Wanted(groups_by_name[group], group, self.ranks(group), layout.bytes, str(layout)))
        return found

    def on(self, layouts: Mapping[str, Layout], pools: Mapping[str, Pool]) -> dict[str, Copied]:
        """Map the name of each start to the collective by copies that generated code runs for it."""
        shard_of = {whole: shard for shard, whole in pooled(self.schedule).written.items()}
        found: dict[str, Copied] = {}
        for group, of_group in self.groups.items():
            forms, blocks = [form for _, form in of_group.starts], [_blocks(node) for node, _ in of_group.starts]
            copies = GraphCopies(pools[group], layouts[group], forms, blocks)
            for index, (node, form) in enumerate(of_group.starts):
                roots = [self.schedule.root(name) for name in node.writes]
                held = frozenset(roots) if form.in_pool else frozenset()
                shards = {shard_of[root]: at for at, root in enumerate(roots) if root in shard_of}
                found[node.name] = Copied(copies, index, held, shards)
        return found


def stored_copies(copies: Mapping[str, Copied]) -> list[StoredCopies]:
    """Return the parts of a graph's copies that are cached, one per group."""
    return [graph_copies.stored for graph_copies in {copied.copies: None for copied in copies.values()}]


def copying(schedule: Schedule) -> Copying:
    """Collect the collectives by copies of `schedule` and the events that determine their slots in the pools.

    ScheduleError if a slot is used until the end, because a collective that reads or fills it has no wait.
    """
    groups: dict[str, _GroupCopies] = {}
    start_of: dict[str, Node] = {}  # result of a copied collective -> its start
    forms = forms_of(schedule)
    for node in schedule.starts():
        if node.name in forms:
            of_group = groups.setdefault(node.group, _GroupCopies())
            of_group.starts.append((node, forms[node.name]))
            for root in map(schedule.root, node.writes):
                of_group.tensors[root] = len(of_group.tensors)
                start_of[root] = node
    brought, written = pooled(schedule).brought, pooled(schedule).written
    taken: set[str] = set()
    released: set[str] = set()

    def take(root: str) -> None:
        if root not in taken:
            taken.add(root)
            start = start_of[root]
            of_group = groups[start.group]
            size_bytes = slot_bytes(schedule, root, forms[start.name], start)
            of_group.events.append(Take(of_group.tensors[root], size_bytes))

    def release(root: str) -> None:
        of_group = groups[start_of[root].group]
        of_group.events.append(Release(of_group.tensors[root]))
        released.add(root)

    for at, (node, frees) in enumerate(zip(schedule.nodes, analyze(schedule).frees, strict=True)):
        for shard in node.writes:
            if shard in written:
                take(written[shard])
        if node.name in forms:
            roots = [schedule.root(name) for name in node.writes]
            for root in roots:
                take(root)
            of_group = groups[node.group]
            of_group.events.append(Start(tuple(of_group.tensors[root] for root in roots)))
        # A result outside of the pool needs its slot there only until the wait.
        start = schedule.nodes[schedule.started[at]] if at in schedule.started else None
        if start is not None and start.name in forms and not forms[start.name].in_pool:
            waited = {schedule.root(name) for name in node.reads}
            for root in map(schedule.root, start.writes):
                if root in waited:
                    release(root)
        for root in frees:
            if root in brought:
                release(root)
    if taken != released:
        _check_waited(schedule, taken - released)
    return Copying(schedule, groups)


def _check_waited(schedule: Schedule, used: set[str]) -> None:
    """Raise ScheduleError for a start without a wait that uses one of the buffers `used`, which are in a pool."""
    for start in schedule.starts():
        if schedule.wait_of(start) is None and not used.isdisjoint(map(schedule.root, (*start.reads, *start.writes))):
            raise ScheduleError(
                f"{schedule.name}: {start.name} uses memory of collectives by copies, and is never waited for\n"
                f"hint: a wait for its result, such as `w = wait({start.name})`, releases that memory"
            )


def forms_of(schedule: Schedule) -> dict[str, Form]:
    """Map the name of each start by copies to its form: results stay in the pool unless they outlive the graph."""
    brought = set(pooled(schedule).brought.values())
    found: dict[str, Form] = {}
    for node in schedule.starts():
        if node.comm is not None and node.comm.via == COPY:
            found[node.name] = _form(node, node.name in brought)
    return found


def _form(node: Node, in_pool: bool) -> Form:
    assert node.comm is not None
    if node.comm.collective != ALL_TO_ALL:
        return Form.GATHERED if in_pool else Form.PULLED
    if isinstance(node.payload, StartOp) and node.payload.call.target is EXCHANGE:
        assert in_pool, "the sum that reads an exchange is in the same graph"
        return Form.FROM_OTHERS
    return Form.EXCHANGED if in_pool else Form.TAKEN_OUT


def _blocks(start: Node) -> int:
    """Return the number of blocks in each of its tensors; each block is gathered or exchanged separately."""
    payload = start.payload
    assert payload is None or isinstance(payload, StartOp)
    return blocks_of(payload.call.target, payload.call.args) if payload is not None else 1


def laid_out_bytes(schedule: Schedule) -> int:
    """Return the total size of the pools that the copies of `schedule` need."""
    return schedule.fact(
        "laid_out_bytes", lambda: sum(layout.bytes for layout in copying(schedule).laid_out().values())
    )


def peak_with_pools(schedule: Schedule, shared_bytes: int | None = None, at_least_bytes: int = 0) -> int:
    """Return the peak memory of `schedule` in bytes, with the pools for copies at their laid-out size.

    shared_bytes: the total size of the pools, if already known; None lays them out, with `at_least_bytes`.
    """
    if shared_bytes is None:
        shared_bytes = max(laid_out_bytes(schedule), at_least_bytes)
    memory = analyze(schedule)
    return memory.peak_bytes - memory.pool_bytes + shared_bytes


def peak_before(schedule: Schedule, beside_pools_bytes: int) -> int:
    """Return the peak in bytes of a forward `schedule`, and of its backward if that shares pools of this forward and
    needs `beside_pools_bytes` besides them."""
    shared_bytes = laid_out_bytes(schedule)
    peak = peak_with_pools(schedule, shared_bytes)
    return max(peak, beside_pools_bytes + shared_bytes) if shared_bytes else peak


def slot_bytes(schedule: Schedule, root: str, form: Form, start: Node) -> int:
    """Return the bytes of the slot for result `root` of `start`: the whole result, or for PULLED this rank's shard."""
    assert start.comm is not None
    brought = schedule.buffers[root].bytes
    return -(-brought // start.comm.size) if form is Form.PULLED else brought
