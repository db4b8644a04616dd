"""`Schedule`: the launches and waits of a compiled step, in order.

It is the only type that estimators and passes work on. It is immutable: a move returns a new schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Any, TypeVar

from overlapc.errors import ScheduleError, unknown_name

_T = TypeVar("_T")


class Kind(Enum):
    """The role of a node in scheduling; `Node.op` names its kernel or collective."""

    KERNEL = "kernel"  # a generated kernel, on the compute stream
    EXTERN = "extern"  # a library or eager call, on the compute stream
    START = "start"  # launches a collective, which is then in flight on its queue; does not block
    WAIT = "wait"  # blocks the compute stream until a START is done; takes no time itself; may be one for each output
    COMM = "comm"  # blocking communication, or communication of unknown kind: see Node.is_barrier
    VIEW = "view"  # another name or shape for a buffer; never launched
    NOOP = "noop"  # has an effect on order or memory only; takes no time


COMPUTE = (Kind.KERNEL, Kind.EXTERN)
COMMUNICATION = (Kind.START, Kind.COMM)


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimated duration of a node."""

    ns: float  # nanoseconds
    source: str  # "roofline", "table h200-nvlink", "measured", "given" ...: printed in every report


@dataclass(frozen=True, slots=True)
class Comm:
    """The data, process group and transport of a collective; set on START and COMM nodes.

    `bytes` depends on the collective: all_gather and all_to_all count the gathered output, reduce_scatter the unreduced
    input, all_reduce, broadcast and point_to_point the tensor once.
    """

    collective: str  # a row of `schedule.collective_kinds`, "point_to_point" or "unknown"
    bytes: int
    group: str  # process group, by a name equal on all ranks (such as mesh axis "dp"); its order is equal, too
    size: int  # number of ranks in the group; 0 if unknown
    dtype: str = ""
    ranks: tuple[int, ...] = ()  # global ranks of the group, if known
    unit: str = ""  # parameters gathered and reduced together: the module passed to `fully_shard`; "" for none
    channels: int = 0  # the SM budget of its process group (NCCL's max_ctas); 0: the library chooses
    safe: bool = False  # for COMM: its effect is known or declared, so communication on other groups may cross it
    via: str = ""  # transport: "" for the process group's library, "copy" for copies
    variant: str = ""  # the reduction if it is not a sum ("avg"), or "2 blocks": what one launch cannot mix
    param: str = field(default="", compare=False)  # the sharded parameter that it serves; "" for none and for several
    param_number: int = field(default=-1, compare=False)  # of this parameter; see `ParamLabel.number`

    @property
    def queue(self) -> str:
        """The first-in-first-out resource that a collective in flight occupies: its group's library, or copies."""
        return f"{self.group} via {self.via}" if self.via else self.group

    @property
    def carried(self) -> str:
        """Kind and transport, as in the names of a profile's tables: `all_gather`, `all_gather via copy`."""
        return f"{self.collective} via {self.via}" if self.via else self.collective


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a compute node. `bytes` counts the accessed bytes of each buffer once."""

    flops: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    dtype: str = ""
    form: str = ""  # of a generated kernel: "" if element-wise; "rows", "long_rows" or "columns" if it reduces these


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a node: FX node names and the user's line (`file:line: code`)."""

    fx: tuple[str, ...] = ()
    source: str = ""
    module: str = ""  # the nn.Module path, such as "layers.3.mlp"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A name for memory. Buffers with the same root (the end of the chain of `alias_of`) share storage."""

    name: str
    bytes: int  # of its storage; 0 if alias_of is set
    alias_of: str | None = None  # views, waits and in-place results
    is_input: bool = False
    freeable: bool = False  # an input that the schedule may free after its last use (donated)


@dataclass(frozen=True, slots=True)
class Node:
    """One launch or wait.

    `reads` and `writes` are buffer names; a write defines the buffer (once in a schedule). `mutates` are
    buffers overwritten in place: each is also the `alias_of` of one of `writes`. `after` are the names of nodes
    that must come earlier although there is no data dependence on them.
    """

    name: str
    kind: Kind
    op: str
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    mutates: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    work: Work | None = None
    comm: Comm | None = None
    estimate: Estimate | None = None
    scratch_bytes: int = 0  # allocated and freed within the node
    origin: Origin = field(default_factory=Origin, compare=False)
    payload: Any = field(default=None, compare=False, repr=False)  # data for codegen, opaque to passes

    @property
    def group(self) -> str:
        """The process group of a node that communicates; "" for other nodes and for unknown groups."""
        return "" if self.comm is None else self.comm.group

    @property
    def queue(self) -> str:
        """The queue of a node that communicates (see `Comm.queue`); "" for other nodes and for unknown groups."""
        return "" if self.comm is None else self.comm.queue

    @property
    def is_barrier(self) -> bool:
        """Whether no START and no WAIT may cross the node: it is a COMM whose effect is neither known nor declared."""
        return self.kind is Kind.COMM and (self.comm is None or not self.comm.safe)


@dataclass(frozen=True)
class Schedule:
    """Nodes in execution order, and the buffers they use. `outputs` are never freed.

    Lookups by name raise ScheduleError for an unknown name; their index is built in one pass at the first lookup.
    A pass that makes many moves works on positions (`memory.MemoryTimeline` maintains an order and its live bytes)
    and makes one Schedule at the end.
    """

    name: str
    nodes: tuple[Node, ...]
    buffers: Mapping[str, Buffer]
    outputs: tuple[str, ...] = ()
    budget_bytes: int | None = None
    # The schedule this one was reordered from: its order defines which access of a buffer, and which
    # collective of a group, comes first. See dependencies.of.
    moved_from: Schedule | None = field(default=None, compare=False, repr=False)
    collectives_moved: bool = field(default=False, compare=False, repr=False)  # a pass reordered collectives on purpose
    # Another schedule with most of the same nodes, whose cached facts about these nodes are reused.
    like: Schedule | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        from overlapc.schedule.printer import print_schedule  # imported here, because it imports this module

        return print_schedule(self)

    @cached_property
    def _index(self) -> _Index:
        found = None if self.moved_from is None else _Index.reordered(self.moved_from, self)
        return _Index.of(self) if found is None else found

    @cached_property
    def _facts(self) -> dict[str, tuple[object, Any]]:
        return {}

    def fact(self, name: str, make: Callable[[], _T], of: object = None) -> _T:
        """Return the result of `make()`, cached in the schedule under `name`; recomputed if `of` differs.

        Used for results that other modules compute from a schedule and need often: dependences, liveness, a simulation.
        """
        if name not in self._facts or not _same(self._facts[name][0], of):
            self._facts[name] = of, make()
        found: _T = self._facts[name][1]
        return found

    def known_fact(self, name: str, of: object = None) -> Any:
        """Return the cached result of `fact(name, ..., of)`; None if there is none."""
        about, found = self._facts.get(name, (None, None))
        return found if _same(about, of) else None

    def forget(self, name: str) -> None:
        """Drop a cached result that is no longer needed, because it is large."""
        self._facts.pop(name, None)

    @cached_property
    def _readers(self) -> Mapping[str, Sequence[int]]:
        """Positions of the nodes that read each name, in order."""
        readers: dict[str, list[int]] = {}
        for at, node in enumerate(self.nodes):
            for name in dict.fromkeys(node.reads):
                readers.setdefault(name, []).append(at)
        return readers

    def node(self, name: str) -> Node:
        """Return the node of that name."""
        return self.nodes[self.position(name)]

    def position(self, name: str) -> int:
        """Return the position of the node of that name."""
        try:
            return self._index.position[name]
        except KeyError:
            raise ScheduleError(unknown_name("node", name, self._index.position)) from None

    @property
    def positions(self) -> Mapping[str, int]:
        """The position of each node, by name."""
        return self._index.position

    @property
    def producers(self) -> Mapping[str, int]:
        """The position of the node that defines each buffer; inputs are missing."""
        return self._index.producer

    def producer(self, buffer: str) -> Node | None:
        """Return the node that defines `buffer`; None for an input."""
        at = self._index.producer.get(buffer)
        if at is None and buffer not in self.buffers:
            raise ScheduleError(unknown_name("buffer", buffer, self.buffers))
        return None if at is None else self.nodes[at]

    def readers(self, buffer: str) -> tuple[Node, ...]:
        """Return the nodes that read exactly this name (not its aliases), in order."""
        return tuple(self.nodes[at] for at in self._readers.get(buffer, ()))

    def root(self, buffer: str) -> str:
        """Return the root of `buffer`, which names its storage: the end of its chain of `alias_of`."""
        try:
            return self._index.root[buffer]
        except KeyError:
            raise ScheduleError(unknown_name("buffer", buffer, self.buffers)) from None

    def starts(self) -> tuple[Node, ...]:
        """Return all START nodes, in order."""
        return tuple(node for node in self.nodes if node.kind is Kind.START)

    def waits(self) -> tuple[Node, ...]:
        """Return all WAIT nodes, in order."""
        return tuple(node for node in self.nodes if node.kind is Kind.WAIT)

    def start_of(self, wait: Node | str) -> Node:
        """Return the START that `wait` waits for. ScheduleError if it waits for none."""
        name = wait if isinstance(wait, str) else wait.name
        at = self._index.start_of.get(self.position(name))
        if at is None:
            raise ScheduleError(f"{name} waits for nothing: none of its reads is written by a start")
        return self.nodes[at]

    def wait_of(self, start: Node | str) -> Node | None:
        """Return the first WAIT for `start`; None if there is none."""
        name = start if isinstance(start, str) else start.name
        at = self._index.wait_of.get(self.position(name))
        return None if at is None else self.nodes[at]

    @property
    def started(self) -> Mapping[int, int]:
        """The position of the START of each WAIT, by the position of the WAIT."""
        return self._index.start_of

    @cached_property
    def waits_of(self) -> Mapping[int, list[int]]:
        """The positions of the WAITs of each START that has any, in order, by the position of the START."""
        waits: dict[int, list[int]] = {}
        for wait, start in self.started.items():
            waits.setdefault(start, []).append(wait)
        return waits

    def first_reader(self, node: Node | str) -> Node | None:
        """Return the first node that reads a buffer `node` writes, under the same name; None if no node does."""
        node = self.node(node if isinstance(node, str) else node.name)
        at = [self._readers[name][0] for name in node.writes if name in self._readers]
        return self.nodes[min(at)] if at else None

    def replace_order(self, order: Iterable[str], *, reorder_collectives: bool = False) -> Schedule:
        """Return the schedule with its nodes in another order, given by name; self if that is its order already.

        Dependences are still derived from the original order, so that `verify` finds a wrong order.
        reorder_collectives: the new order of collectives is intended, and is the one to keep from now on.
        """
        position = self.positions
        nodes = tuple([self.nodes[position[name]] if name in position else self.node(name) for name in order])
        if len(nodes) != len(self.nodes) or len({node.name for node in nodes}) != len(nodes):
            raise ScheduleError(f"{self.name}: an order of {len(nodes)} names for {len(self.nodes)} nodes")
        if all(new is old for new, old in zip(nodes, self.nodes, strict=True)):
            return self
        came_from = self if self.collectives_moved else self.moved_from or self
        return replace(self, nodes=nodes, moved_from=came_from, collectives_moved=reorder_collectives, like=came_from)

    def move(self, node: Node | str, *, before: Node | str | None = None, after: Node | str | None = None) -> Schedule:
        """Return the schedule with `node` directly before or after another node; self if it is there already.

        Copies the whole order. Does not check dependences: `verify` does.
        """
        if (before is None) == (after is None):
            raise ScheduleError("move takes one of before= and after=")
        there = before if before is not None else after
        moving = self.node(node if isinstance(node, str) else node.name)
        anchor = self.position(there if isinstance(there, str) else there.name)  # type: ignore[union-attr]
        at = self.position(moving.name)
        if anchor == at:
            return self
        rest = list(self.nodes)
        rest.insert(anchor if before is not None else anchor + 1, moving)
        del rest[at if at < anchor else at + 1]
        return self.replace_order(node.name for node in rest)

    def with_estimates(self, estimates: Mapping[str, Estimate | None]) -> Schedule:
        """Return the schedule with the given estimates, by node name; other nodes keep theirs."""
        return self.with_nodes(
            replace(node, estimate=estimates[node.name]) if node.name in estimates else node for node in self.nodes
        )

    def with_nodes(self, nodes: Iterable[Node], like: Schedule | None = None) -> Schedule:
        """Return the schedule with nodes that differ from its own in nothing but estimates. like: as the field."""
        other = replace(self, nodes=tuple(nodes), like=like or self)
        vars(other)["_index"] = self._index  # names and places are the same
        return other


def _same(one: object, other: object) -> bool:
    return one is other or one == other


@dataclass(frozen=True, slots=True)
class _Index:
    """Positions in `Schedule.nodes` for all lookups, built in one pass."""

    position: dict[str, int]
    producer: dict[str, int]
    root: dict[str, str]
    start_of: dict[int, int]
    wait_of: dict[int, int]

    @classmethod
    def of(cls, schedule: Schedule) -> _Index:
        position: dict[str, int] = {}
        producer: dict[str, int] = {}
        for at, node in enumerate(schedule.nodes):
            if node.name in position:
                raise ScheduleError(f"{schedule.name}: two nodes are named {node.name}")
            position[node.name] = at
            for name in node.writes:
                if name in producer:
                    raise ScheduleError(f"{node.name} and {schedule.nodes[producer[name]].name} both define {name}")
                producer[name] = at
        like = schedule.like
        known = None if like is None or like.buffers is not schedule.buffers else like._index.root
        root = _roots(schedule.buffers) if known is None else known  # raises if aliases are a circle
        start_of: dict[int, int] = {}
        wait_of: dict[int, int] = {}
        for at, node in enumerate(schedule.nodes):
            if node.kind is not Kind.WAIT:
                continue
            found = _started_by(schedule, producer, node)
            if found is not None:
                start_of[at] = found
                wait_of.setdefault(found, at)
        return cls(position, producer, root, start_of, wait_of)

    @classmethod
    def reordered(cls, base: Schedule, schedule: Schedule) -> _Index | None:
        """Derive an index from that of `base`; None unless the nodes differ in nothing but order and estimates."""
        position = {node.name: at for at, node in enumerate(schedule.nodes)}
        if base.buffers is not schedule.buffers or len(position) != len(base.nodes):
            return None
        for node in base.nodes:
            at = position.get(node.name)
            if at is None or schedule.nodes[at].reads is not node.reads or schedule.nodes[at].writes is not node.writes:
                return None
        known = base._index
        to = [position[node.name] for node in base.nodes]
        start_of = {to[wait]: to[start] for wait, start in known.start_of.items()}
        wait_of: dict[int, int] = {}
        for wait, start in start_of.items():
            wait_of[start] = min(wait, wait_of.get(start, wait))
        return cls(
            position,
            {name: to[at] for name, at in known.producer.items()},
            known.root,
            dict(sorted(start_of.items())),
            wait_of,
        )


def _started_by(schedule: Schedule, producer: dict[str, int], wait: Node) -> int | None:
    """Return the position of the START whose output `wait` reads, directly or through views; None if there is none."""
    for read in wait.reads:
        name: str | None = read
        while name is not None:
            at = producer.get(name)
            if at is not None and schedule.nodes[at].kind is Kind.START:
                return at
            buffer = schedule.buffers.get(name)
            name = buffer.alias_of if buffer is not None else None
    return None


def _roots(buffers: Mapping[str, Buffer]) -> dict[str, str]:
    roots: dict[str, str] = {}
    for name in buffers:
        chain: list[str] = []
        while name not in roots:
            if name not in buffers:
                raise ScheduleError(f"{chain[-1]} is an alias of {name}, which is not a buffer of the schedule")
            if len(chain) > len(buffers):
                raise ScheduleError(f"{name} is an alias of itself: {' -> '.join(chain[:8])} ...")
            alias_of = buffers[name].alias_of
            if alias_of is None:
                roots[name] = name
            else:
                chain.append(name)
                name = alias_of
        for alias in chain:
            roots[alias] = roots[name]
    return roots
