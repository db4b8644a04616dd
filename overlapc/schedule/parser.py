"""Reads schedules in the format of `schedule.text`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from overlapc.errors import clipped, unknown_name
from overlapc.gc_paused import gc_paused
from overlapc.schedule.collective_kinds import TRANSPORTS
from overlapc.schedule.model import Buffer, Comm, Estimate, Kind, Node, Origin, Schedule, Work
from overlapc.schedule.scanner import MOST_RANKS, Statement, statements
from overlapc.schedule.syntax import KINDS, default_buffer, default_bytes, default_kind

_SIZE = re.compile(r"[0-9.]+([KMGT]i?)?B")
_COMM_KEYS = frozenset({"dtype", "ranks", "unit", "channels", "variant", "safe", "collective", "moves"})
_WORK_KEYS = frozenset({"flops", "read", "write", "in", "form"})
_KEYS = _COMM_KEYS | _WORK_KEYS | {"after", "mutates", "scratch", "node"}
_COUNT_KEYS = frozenset({"flops", "channels"})
_BYTE_KEYS = frozenset({"moves", "read", "write", "scratch"})
_LIST_KEYS = frozenset({"after", "mutates"})


def parse(text: str) -> Schedule:
    """Return the schedule that `text` describes. ScheduleError with line and column if it cannot be parsed."""
    with gc_paused():  # 60,000 nodes took 7.0 s with garbage collection and 3.2 s without
        draft = _Draft()
        for statement in statements(text):
            draft.add(statement)
            statement.finish()
        return draft.schedule()


@dataclass
class _Draft:
    """The statements parsed so far."""

    name: str = "schedule"
    budget_bytes: int | None = None
    buffers: dict[str, Buffer] = field(default_factory=dict)
    nodes: list[Node] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    node_names: set[str] = field(default_factory=set)
    unsized: list[int] = field(default_factory=list)  # positions of collectives without `moves=`

    def add(self, statement: Statement) -> None:
        """Add one statement."""
        word = statement.peek("word") if statement.peek_mark(1) != "=" else None
        if word == "schedule":
            self._header(statement)
        elif word == "return":
            statement.take("word")
            self.outputs += statement.take_names()
        else:
            self._define(statement)

    def schedule(self) -> Schedule:
        """Return the parsed schedule; undeclared buffers become inputs of size 0."""
        aliases = [buffer.alias_of for buffer in self.buffers.values() if buffer.alias_of is not None]
        for name in [*(name for node in self.nodes for name in node.reads), *aliases]:
            if name not in self.buffers:
                self.buffers[name] = Buffer(name, 0, is_input=True)
        for at in self.unsized:
            node = self.nodes[at]
            assert node.comm is not None
            moved = default_bytes(node.comm.collective, node.reads, node.writes, self.buffers)
            self.nodes[at] = replace(node, comm=replace(node.comm, bytes=moved))
        return Schedule(self.name, tuple(self.nodes), self.buffers, tuple(self.outputs), self.budget_bytes)

    def _header(self, statement: Statement) -> None:
        statement.take("word")
        if statement.peek("word") is not None and statement.peek_mark(1) != "=":
            self.name = statement.take("word")
        if statement.peek("word") == "budget":
            statement.take("word")
            statement.expect("=", "after budget")
            self.budget_bytes = statement.take_bytes()

    def _define(self, statement: Statement) -> None:
        names = statement.take_names()
        statement.expect("=", "after the names a statement defines")
        op = statement.take("word", "an op, input or buffer")
        if op in ("input", "buffer") and statement.peek_mark() != "(":
            self._declare(statement, names, is_input=op == "input")
        else:
            self._node(statement, names, op)

    def _declare(self, statement: Statement, names: list[str], is_input: bool) -> None:
        freeable = statement.peek("word") == "freeable"
        if freeable:
            statement.take("word")
        sized = _sizes(statement, names) if statement.accept(":") else [Buffer(name, 0) for name in names]
        self._add_buffers(statement, [replace(each, is_input=is_input, freeable=freeable) for each in sized])

    def _node(self, statement: Statement, names: list[str], op: str) -> None:
        kind, op = _kind(statement, op)
        statement.expect("(", "and the reads of the op")
        reads = [] if statement.peek_mark() == ")" else statement.take_names()
        statement.expect(")", "after the reads")
        group, size = _group(statement)
        via = _via(statement)
        keys = _Keys.of(statement)
        if group is None:
            for key in sorted(_COMM_KEYS & keys.given):
                statement.fail(f"{key}= needs a group: write @dp before it")
        writes: Sequence[str] = names
        defined = [default_buffer(kind, reads, names, at) for at in range(len(names))]
        estimate = None
        if statement.accept(":"):
            if statement.peek("word") == "none":
                statement.take("word")
                writes, defined = (), []
            elif statement.peek_mark() == "=" or _SIZE.fullmatch(statement.peek("word") or ""):
                defined = _sizes(statement, names)
            estimate = _estimate(statement)
        self._add_buffers(statement, defined)
        name = keys.words.get("node", names[0])
        if name in self.node_names:
            statement.fail(f"a second node named {clipped(name)}")
        self.node_names.add(name)
        if group is not None and "moves" not in keys.given:
            self.unsized.append(len(self.nodes))
        self.nodes.append(
            Node(
                name,
                kind,
                op,
                tuple(reads),
                tuple(writes),
                mutates=keys.lists.get("mutates", ()),
                after=keys.lists.get("after", ()),
                work=keys.work(),
                comm=None if group is None else keys.comm(op, group, size, via),
                estimate=estimate,
                scratch_bytes=keys.numbers.get("scratch", 0),
                origin=_origin(statement.comment),
            )
        )

    def _add_buffers(self, statement: Statement, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            if buffer.name in self.buffers:
                statement.fail(f"{clipped(buffer.name)} is defined a second time")
            self.buffers[buffer.name] = buffer


@dataclass(slots=True)
class _Keys:
    """The KEY=VALUE pairs of a statement."""

    given: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)  # counts and bytes
    words: dict[str, str] = field(default_factory=dict)
    lists: dict[str, tuple[str, ...]] = field(default_factory=dict)
    ranks: tuple[int, ...] = ()

    @classmethod
    def of(cls, statement: Statement) -> _Keys:
        """Take the pairs that come next in `statement`."""
        keys = cls()
        while (key := statement.peek("word")) is not None:
            if key not in _KEYS:
                statement.fail(unknown_name("key", key, _KEYS))
            if key in keys.given:
                statement.fail(f"{key}= is given twice")
            keys.given.add(statement.take("word"))
            statement.expect("=", f"after {key}")
            if key in _BYTE_KEYS:
                keys.numbers[key] = statement.take_bytes()
            elif key in _COUNT_KEYS:
                keys.numbers[key] = statement.take_integer()
            elif key in _LIST_KEYS:
                keys.lists[key] = tuple(statement.take_names())
            elif key == "ranks":
                keys.ranks = _ranks(statement)
            else:
                keys.words[key] = statement.take("word")
        return keys

    def work(self) -> Work | None:
        """Return the node's work; None if no key gives it."""
        if not _WORK_KEYS & self.given:
            return None
        numbers = self.numbers
        return Work(
            flops=numbers.get("flops", 0),
            read_bytes=numbers.get("read", 0),
            write_bytes=numbers.get("write", 0),
            dtype=self.words.get("in", ""),
            form=self.words.get("form", ""),
        )

    def comm(self, op: str, group: str, size: int, via: str) -> Comm:
        """Return the communication of a node of `op` within `group`; its bytes are 0 without `moves=`."""
        return Comm(
            self.words.get("collective", op),
            self.numbers.get("moves", 0),
            group,
            size,
            dtype=self.words.get("dtype", ""),
            ranks=self.ranks,
            unit=self.words.get("unit", ""),
            channels=self.numbers.get("channels", 0),
            safe=self.words.get("safe") == "yes",
            via=via,
            variant=self.words.get("variant", ""),
        )


def _kind(statement: Statement, op: str) -> tuple[Kind, str]:
    """Return kind and op of a node whose first word is `op`."""
    if statement.accept(":"):
        if op not in KINDS:
            statement.fail(unknown_name("kind of node", op, KINDS), back=2)
        return KINDS[op], statement.take("word", "an op")
    kind = default_kind(op)
    if kind is None:
        name = clipped(op)
        statement.fail(f"'{name}' is not a collective or a kind of node; write kernel:{name} or extern:{name}", back=1)
    return kind, op


def _group(statement: Statement) -> tuple[str | None, int]:
    """Take `@dp(8)`; return name and size, None without a group, and 0 without a size."""
    if not statement.accept("@"):
        return None, 0
    group, size = statement.take("word", "a group's name"), 0
    if statement.accept("("):
        size = statement.take_integer(MOST_RANKS)
        statement.expect(")", "after the group's size")
    return group, size


def _via(statement: Statement) -> str:
    """Take `via copy`; return "copy", or "" without `via`."""
    if statement.peek("word") != "via":
        return ""
    statement.take("word")
    transport = statement.take("word", "a transport")
    if transport not in TRANSPORTS:
        statement.fail(unknown_name("transport", transport, TRANSPORTS), back=1)
    return transport


def _sizes(statement: Statement, names: Sequence[str]) -> list[Buffer]:
    """Take one size or alias for each of `names`; return their buffers."""
    sized: list[Buffer] = []
    for at, name in enumerate(names):
        if at:
            statement.expect(",", f"and the size of {name}")
        if statement.accept("="):
            sized.append(Buffer(name, 0, alias_of=statement.take("word", "the name of the aliased buffer")))
        else:
            sized.append(Buffer(name, statement.take_bytes()))
    return sized


def _estimate(statement: Statement) -> Estimate | None:
    if statement.peek("word") is None:
        return None
    ns = statement.take_ns()
    source = statement.take_source()
    return Estimate(ns, "given" if source is None else source)


def _ranks(statement: Statement) -> tuple[int, ...]:
    """Take `0-3,8`; return (0, 1, 2, 3, 8)."""
    ranks: list[int] = []
    while True:
        part = statement.expect_ranks()
        if len(ranks) + len(part) > MOST_RANKS:
            statement.fail(f"more than {MOST_RANKS:,} ranks in one group", back=1)
        ranks += part
        if not statement.accept(","):
            return tuple(ranks)


def _origin(comment: str) -> Origin:
    """Return the origin in a comment of the printer's form; an empty one for any other comment."""
    parts = [part.strip() for part in f" {comment} ".split(" | ", 2)]
    return Origin(tuple(parts[0].split()), source=parts[2], module=parts[1]) if len(parts) == 3 else Origin()
