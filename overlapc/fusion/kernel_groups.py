"""State of fusion: groups of ops, the buffers that they read and write, their order and the waits before them.

When one group replaces two, five data structures change together: readers and writers of each buffer, the order, live
memory, the waits before each group, and the starts after it. Only `Groups` changes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from overlapc.fusion.deps import callers_memory, edges, output_buffers
from overlapc.fusion.live import Beside, LiveBytes, nothing_beside
from overlapc.fusion.merge import Refusal
from overlapc.fusion.merging_order import MergingOrder, Reach
from overlapc.ir.body import Body, Checked, topological
from overlapc.ir.ops import Combo, IROp, Loops, LoweredGraph, Start, Wait, buffers_read, buffers_written


@dataclass(slots=True)
class Group:
    """Kernels that have been fused or combined so far. A group of another kind of op never merges."""

    number: int
    op: IROp
    members: list[str]
    reads: set[str]
    writes: set[str]
    runs_at: int  # number of the op at whose position it runs
    grown: int = 0  # number of its merges

    @property
    def dots(self) -> bool:
        """Whether it contains a matrix product."""
        return isinstance(self.op, Loops) and bool(self.op.body.dots())

    @property
    def kernel(self) -> Loops:
        """The generated kernel of the group."""
        assert isinstance(self.op, Loops), f"{self.op.name} is no generated kernel"
        return self.op


class Groups:
    """The groups of one graph, by number; at first each op is a group of its own."""

    def __init__(
        self,
        ops: Sequence[IROp],
        graph: LoweredGraph,
        freeable: Collection[str] = (),
        beside: Beside = nothing_beside,
    ) -> None:
        """freeable: inputs that only the graph holds. beside: memory in use beside that of `ops`."""
        self.graph = graph
        self.given = callers_memory(graph)
        dependences = edges(ops, graph)
        self.order = MergingOrder(dependences.before)
        self._groups: dict[int, Group] = {}
        self._sizes: dict[str, int] = {}
        self.outputs = output_buffers(graph) | set(graph.aliases) | set(graph.aliases.values())
        self.memory = LiveBytes(ops, graph, self.bytes_of, freeable, beside)
        self.readers: defaultdict[str, set[int]] = defaultdict(set)
        self.writer: dict[str, int] = {}
        for number, op in enumerate(ops):
            group = Group(number, op, [op.name], buffers_read(op), set(buffers_written(op)), number)
            self._groups[number] = group
            for name in group.reads:
                self.readers[name].add(number)
            for name in group.writes:
                self.writer[name] = number
        order = range(len(ops))
        self._waits = Reach([at for at in order if isinstance(ops[at], Wait)], self.order.after, order)
        self._starts = Reach([at for at in order if isinstance(ops[at], Start)], self.order.before, reversed(order))

    def __getitem__(self, number: int) -> Group:
        return self._groups[number]

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def ops(self) -> list[IROp]:
        """Return the ops of all remaining groups, in a legal order."""
        return [self._groups[number].op for number in self.order.order()]

    # --- questions about two groups

    def in_order(self, a: int, b: int) -> tuple[int, int]:
        """Return the two group numbers, the earlier group's first."""
        return (a, b) if self.order.position[a] < self.order.position[b] else (b, a)

    def bytes_of(self, name: str) -> int:
        """Return the bytes of a buffer at the traced sizes; 0 for a value that is not a tensor."""
        known = self._sizes.get(name)
        if known is None:
            view = self.graph.views.get(name)
            known = self._sizes[name] = self.graph.hint(view.layout.storage_bytes()) if view is not None else 0
        return known

    def local(self, a: Group, b: Group) -> set[str]:
        """Return the buffers that only the fused kernel would use, so that they need no memory."""
        both = {a.number, b.number}
        local = {name for name in a.writes | b.writes if self.readers[name] <= both and name not in self.outputs}
        unread = {name for name in local if not self.readers[name]}
        return local - _with_checks((a.kernel.body, b.kernel.body), unread) if unread else local

    def obstacle(self, a: Group, b: Group) -> Refusal | None:
        """Return why no launch can do the work of both groups, of which `a` is earlier, or None."""
        if a.op.device != b.op.device:  # type: ignore[union-attr]
            return Refusal("they run on different devices")
        # If one group precedes a start and the other follows a wait, the start would depend on the wait: the merged
        # kernel would prevent overlap that the passes could have planned.
        waits, starts = self._waits.differ(a.number, b.number), self._starts.differ(a.number, b.number)
        if (starts[0] and waits[1]) or (starts[1] and waits[0]):
            return Refusal("one precedes a collective's start, the other follows a wait")
        between = self.order.between(a.number, b.number)
        return None if between is None else Refusal(f"{self._groups[between].op.name} must run between them")

    def outgrows(self, a: Group, b: Group, op: Loops | Combo, local: set[str]) -> Refusal | None:
        """Return a refusal if `op`, which replaces both groups, raises peak memory, else None.

        local: buffers that then need no memory.
        """
        stays, moves = self._position_of_merge(a, b)
        changes = self.memory.moved(moves.reads, moves.writes, moves.runs_at, stays.runs_at, local)
        changes += self.memory.rewritten(op, moves.runs_at, stays.runs_at, local)
        if not self.memory.fits(changes):
            more = sum(change.bytes for change in changes if change.bytes > 0)
            return Refusal(f"it would keep {more} more bytes live and exceed peak memory")
        return None

    def _position_of_merge(self, a: Group, b: Group) -> tuple[Group, Group]:
        """Return the group at whose position both would run (as `MergingOrder.merge` decides), and the other one."""
        first, second = self.in_order(a.number, b.number)
        if self.order.may_run_early(first, second):
            return self._groups[first], self._groups[second]
        moves, stays = sorted((a, b), key=lambda group: group.runs_at)
        return stays, moves

    # --- merging two groups

    def make_room(self, a: Group, b: Group) -> tuple[Group, Group]:
        """Give both groups, of which `a` is earlier, one position; return the group at whose position, and the other.

        There must be no `obstacle`.
        """
        place = self._position_of_merge(a, b)
        self.order.merge(a.number, b.number)
        return place

    def replace(self, a: Group, b: Group, op: Loops | Combo, local: set[str], place: tuple[Group, Group]) -> None:
        """Replace both groups by `op` at `place`, the result of `make_room`; `local` buffers need no memory then."""
        kept, merged = min(a.number, b.number), max(a.number, b.number)
        stays, moves = place
        self.memory.move(moves.reads, moves.writes, moves.runs_at, stays.runs_at, local, op)
        for name in a.reads | b.reads:
            self.readers[name] -= {kept, merged}
        for name in a.writes | b.writes:
            self.writer[name] = kept
        for name in local:
            del self.readers[name], self.writer[name]
        group = Group(
            kept,
            op,
            a.members + b.members,
            buffers_read(op),
            (a.writes | b.writes) - local,
            stays.runs_at,
            grown=self._groups[kept].grown + 1,
        )
        for name in group.reads:
            self.readers[name].add(kept)
        del self._groups[merged]
        self._groups[kept] = group
        for reach in (self._waits, self._starts):
            reach.merge(kept, merged)


def _with_checks(bodies: Iterable[Body], unread: set[str]) -> set[str]:
    """Return the buffers in `unread` whose stores contain checks, which would be lost without the store."""
    return {
        store.buffer
        for body in bodies
        for store in body.stores
        if store.buffer in unread and any(isinstance(value, Checked) for value in topological(store.operands()))
    }
