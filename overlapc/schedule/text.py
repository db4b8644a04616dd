"""Schedules as text: `parse(str(schedule)) == schedule`.

    schedule llama_fwd  budget=12GiB
    %p0 = input                      : 64MiB
    ag0 = all_gather(%p0) @dp(8)     : 512MiB  1180us [table h200-nvlink]
    %w0 = wait(ag0)
    mm0 = extern:mm(%x, %w0)         : 96MiB  640us [roofline]      # mm_3 | layers.0 | model.py:31: x @ w
    return mm0

One statement a line, or several with `;`. A statement is

    WRITES = OP(READS) @GROUP(SIZE) KEY=VALUE ... : SIZES  TIME [SOURCE]
    NAME = input freeable : SIZE

- WRITES: the buffers it defines; the first is also the node's name unless `node=NAME` says otherwise.
- OP: a collective's name (a start), `wait`, `kernel`, `extern`, `view`, `noop`, `comm`, or KIND:OP.
- KEY: `after`, `mutates` (lists), `scratch`, `flops`, `read`, `write`, `in` (what the work is done in), `form` (of a
  generated kernel), and for communication `dtype`, `ranks`, `unit`, `channels`, `safe=yes`, `collective`, `moves` (its
  bytes, when not its definition's).
- SIZES: one a write; `=NAME` for an alias, `none` for a node that defines nothing. A wait or view that
  says nothing defines aliases of what it reads. Undeclared reads are inputs of no size.
- A time without SOURCE is `given`. Text after `#` is a comment; origins print as one and are not read.

Names with other characters than letters, digits and `%_.$/+-` are quoted as in JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from overlapc.errors import ConfigError, ScheduleError, unknown_name
from overlapc.garbage import no_collections
from overlapc.schedule.model import Buffer, Comm, Estimate, Kind, Node, Origin, Schedule, Work
from overlapc.units import format_bytes, format_ns, parse_bytes, parse_ns

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "broadcast")
_OUTPUT_SIZED = ("all_gather", "all_to_all")
_ALIASING = (Kind.WAIT, Kind.VIEW)  # what these define is an alias of what they read unless said otherwise
_KINDS = {kind.value: kind for kind in Kind}
_WORD = re.compile(r"[%\w.$/+-]+")
_TOKEN = re.compile(
    r"""(?P<space>[ \t\r]+|\#[^\n]*)|(?P<end>[;\n])|(?P<string>"(?:[^"\\\n]|\\.)*")|(?P<source>\[[^\]\n]*\])"""
    r"""|(?P<word>[%\w.$/+-]+)|(?P<mark>[=(),:@])""",
)


def print_schedule(schedule: Schedule) -> str:
    """The text of a schedule, ending with a newline. ScheduleError for what the format cannot say."""
    budget = "" if schedule.budget_bytes is None else f"  budget={format_bytes(schedule.budget_bytes)}"
    rows = [*_declarations(schedule), *(_row(schedule, node) for node in schedule.nodes)]
    left = _column([row[0] for row in rows], step=4, most=24)
    middle = _column([row[1] for row in rows], step=16, most=80)
    lines = [f"schedule {_quote(schedule.name)}{budget}"]
    for names, head, tail, comment in rows:
        line = f"{names:<{left}} = {head:<{middle}}"
        line += f" : {tail}" if tail else ""
        lines.append(f"{line.rstrip()}  # {comment}" if comment else line.rstrip())
    if schedule.outputs:
        lines.append(f"return {', '.join(map(_quote, schedule.outputs))}")
    return "\n".join(lines) + "\n"


def print_node(schedule: Schedule, node: Node) -> str:
    """The statement of one node, without its origin."""
    names, head, tail, _ = _row(schedule, node)
    return f"{names} = {head}" + (f" : {tail}" if tail else "")


def parse(text: str) -> Schedule:
    """The schedule that `text` describes. ScheduleError with line and column for what it cannot read."""
    with no_collections():  # 60,000 nodes took 7.0 s with them and 3.2 s without
        return _parse(text)


def _parse(text: str) -> Schedule:
    draft = _Draft()
    for statement in _statements(text):
        if statement.peek("word") == "schedule" and statement.peek_mark(1) != "=":
            draft.header(statement)
        elif statement.peek("word") == "return" and statement.peek_mark(1) != "=":
            statement.take("word")
            draft.outputs.extend(_names(statement))
        else:
            draft.define(statement)
        statement.finish()
    return draft.schedule()


def default_comm_bytes(
    collective: str, reads: Sequence[str], writes: Sequence[str], bytes_of: Callable[[str], int]
) -> int:
    """Bytes of a collective by its own definition; `bytes_of` gives the storage bytes behind a name."""
    return sum(bytes_of(name) for name in (writes if collective in _OUTPUT_SIZED else reads))


# Printing


def _declarations(schedule: Schedule) -> Iterator[tuple[str, str, str, str]]:
    for buffer in schedule.buffers.values():
        if buffer.alias_of is not None and buffer.bytes:
            raise ScheduleError(f"{buffer.name} is an alias of {buffer.alias_of} and has bytes of its own")
        if schedule.producer(buffer.name) is None:
            head = ("input" if buffer.is_input else "buffer") + (" freeable" if buffer.freeable else "")
            yield _quote(buffer.name), head, _slot(buffer), ""
        elif buffer.is_input or buffer.freeable:
            raise ScheduleError(f"{buffer.name} is an input and also written by a node")


def _row(schedule: Schedule, node: Node) -> tuple[str, str, str, str]:
    names = ", ".join(map(_quote, node.writes)) or _quote(node.name)
    return names, _head(schedule, node), _tail(schedule, node), _origin(node.origin)


def _head(schedule: Schedule, node: Node) -> str:
    op = _quote(node.op)
    if _default_kind(node.op) is not node.kind:
        op = f"{node.kind.value}:{op}"
    words = [f"{op}({', '.join(map(_quote, node.reads))})"]
    comm, work = node.comm, node.work
    if comm is not None:
        words.append(f"@{_quote(comm.group)}" + (f"({comm.size})" if comm.size else ""))
        words += _pairs(
            collective="" if comm.collective == node.op else _quote(comm.collective),
            dtype=_quote(comm.dtype) if comm.dtype else "",
            ranks=_ranges(comm.ranks),
            unit=_quote(comm.unit) if comm.unit else "",
            channels=str(comm.channels) if comm.channels else "",
            safe="yes" if comm.safe else "",
        )
        bytes_of = _bytes_behind(schedule.buffers)
        if comm.bytes != default_comm_bytes(comm.collective, node.reads, node.writes, bytes_of):
            words.append(f"moves={format_bytes(comm.bytes)}")
    if work is not None:
        words.append(f"flops={work.flops}")
        words += _pairs(
            read=format_bytes(work.read_bytes) if work.read_bytes else "",
            write=format_bytes(work.write_bytes) if work.write_bytes else "",
        )
        words += [f"in={_quote(work.dtype)}"] if work.dtype else []
        words += [f"form={_quote(work.form)}"] if work.form else []
    words += _pairs(
        mutates=",".join(map(_quote, node.mutates)),
        after=",".join(map(_quote, node.after)),
        scratch=format_bytes(node.scratch_bytes) if node.scratch_bytes else "",
        node=_quote(node.name) if node.writes and node.writes[0] != node.name else "",
    )
    return " ".join(words)


def _tail(schedule: Schedule, node: Node) -> str:
    buffers = [schedule.buffers[name] for name in node.writes]
    expected = [_default_buffer(node.kind, node.reads, node.writes, at) for at in range(len(node.writes))]
    parts = []
    if not node.writes:
        parts.append("none")
    elif buffers != expected:
        parts.append(", ".join(map(_slot, buffers)))
    if node.estimate is not None:
        source = node.estimate.source
        if "]" in source or "\n" in source:
            raise ScheduleError(f"{node.name}: the estimate's source {source!r} may not hold ']' or a line break")
        parts.append(format_ns(node.estimate.ns) + ("" if source == "given" else f" [{source}]"))
    return "  ".join(parts)


def _origin(origin: Origin) -> str:
    parts = (" ".join(origin.fx), origin.module, origin.source)
    return " | ".join(part for part in parts if part).replace("\n", " ")


def _pairs(**values: str) -> list[str]:
    return [f"{key}={value}" for key, value in values.items() if value]


def _slot(buffer: Buffer) -> str:
    return format_bytes(buffer.bytes) if buffer.alias_of is None else f"={_quote(buffer.alias_of)}"


def _quote(name: str) -> str:
    return name if _WORD.fullmatch(name) else json.dumps(name)


def _ranges(ranks: Sequence[int]) -> str:
    """`0-3,8` for (0, 1, 2, 3, 8); reads back in the same order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _column(cells: Sequence[str], step: int, most: int) -> int:
    """Width of a column: rounded up, so that one longer cell seldom moves all the other lines of a diff."""
    widest = max((len(cell) for cell in cells), default=0)
    return min(most, -(-widest // step) * step)


# What text may leave out


def _default_kind(op: str) -> Kind | None:
    return Kind.START if op in COLLECTIVES else _KINDS.get(op)


def _default_buffer(kind: Kind, reads: Sequence[str], writes: Sequence[str], at: int) -> Buffer:
    if kind in _ALIASING and reads:
        return Buffer(writes[at], 0, alias_of=reads[at if len(reads) == len(writes) else 0])
    return Buffer(writes[at], 0)


def _bytes_behind(buffers: Mapping[str, Buffer]) -> Callable[[str], int]:
    def bytes_of(name: str) -> int:
        for _ in range(len(buffers)):
            buffer = buffers[name]
            if buffer.alias_of is None:
                return buffer.bytes
            name = buffer.alias_of
        raise ScheduleError(f"{name} is an alias of itself")

    return bytes_of


# Parsing


@dataclass
class _Statement:
    """The tokens of one statement and where it stands; takes what is expected or says what is not."""

    tokens: list[tuple[str, str, int]]  # (kind, text, column)
    line: str
    number: int
    at: int = 0

    def peek(self, kind: str, ahead: int = 0) -> str | None:
        """The text of the token `ahead` of the next if it is of `kind`; words may be quoted."""
        if self.at + ahead >= len(self.tokens):
            return None
        found, text, _ = self.tokens[self.at + ahead]
        if kind == "word" and found == "string":
            return json.loads(text)
        return text if found == kind else None

    def peek_mark(self, ahead: int = 0) -> str | None:
        return self.peek("mark", ahead)

    def take(self, kind: str, what: str = "a name") -> str:
        text = self.peek(kind)
        if text is None:
            self.fail(f"expected {what}")
        self.at += 1
        return text

    def accept(self, mark: str) -> bool:
        if self.peek_mark() != mark:
            return False
        self.at += 1
        return True

    def expect(self, mark: str, what: str) -> None:
        if not self.accept(mark):
            self.fail(f"expected {mark!r} {what}")

    def finish(self) -> None:
        if self.at < len(self.tokens):
            self.fail("did not expect this")

    def fail(self, message: str, back: int = 0) -> NoReturn:
        at = self.at - back
        column = self.tokens[at][2] if at < len(self.tokens) else len(self.line.rstrip())
        raise ScheduleError(f"line {self.number}: {message}\n   {self.line}\n   {' ' * column}^")


def _statements(text: str) -> Iterator[_Statement]:
    lines = text.split("\n")
    number, begin, at = 1, 0, 0
    tokens: list[tuple[str, str, int]] = []
    text += "\n"
    while at < len(text):
        match = _TOKEN.match(text, at)
        column = at - begin
        if match is None:
            line = lines[number - 1]
            raise ScheduleError(f"line {number}: cannot read {text[at]!r}\n   {line}\n   {' ' * column}^")
        at = match.end()
        kind = match.lastgroup
        if kind == "end":
            if tokens:
                yield _Statement(tokens, lines[number - 1], number)
                tokens = []
            if match[0] == "\n":
                number, begin = number + 1, at
        elif kind != "space":
            assert kind is not None
            tokens.append((kind, match[0], column))


def _names(statement: _Statement) -> list[str]:
    names = [statement.take("word")]
    while statement.accept(","):
        names.append(statement.take("word"))
    return names


@dataclass
class _Draft:
    """What has been read so far. Nodes are made last, when every buffer is known."""

    name: str = "schedule"
    budget_bytes: int | None = None
    buffers: dict[str, Buffer] = field(default_factory=dict)
    nodes: list[Callable[[], Node]] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    node_names: set[str] = field(default_factory=set)

    def header(self, statement: _Statement) -> None:
        statement.take("word")
        if statement.peek("word") is not None and statement.peek_mark(1) != "=":
            self.name = statement.take("word")
        if statement.peek("word") == "budget":
            statement.take("word")
            statement.expect("=", "after budget")
            self.budget_bytes = _bytes(statement)

    def define(self, statement: _Statement) -> None:
        names = _names(statement)
        statement.expect("=", "after the names a statement defines")
        op = statement.take("word", "what to do: an op, input or buffer")
        if op in ("input", "buffer") and statement.peek_mark() != "(":
            self._declare(statement, names, op)
        else:
            self._node(statement, names, op)

    def _declare(self, statement: _Statement, names: list[str], word: str) -> None:
        freeable = statement.peek("word") == "freeable"
        if freeable:
            statement.take("word")
        slots = [Buffer(name, 0) for name in names]
        if statement.accept(":"):
            slots = _slots(statement, names)
        for buffer in slots:
            self._add(
                statement,
                Buffer(buffer.name, buffer.bytes, buffer.alias_of, is_input=word == "input", freeable=freeable),
            )

    def _node(self, statement: _Statement, names: list[str], op: str) -> None:
        kind = _default_kind(op)
        if statement.accept(":"):
            if op not in _KINDS:
                statement.fail(unknown_name("kind of node", op, _KINDS), back=2)
            kind, op = _KINDS[op], statement.take("word", "an op")
        elif kind is None:
            statement.fail(f"{op!r} is not a collective or a kind of node; write kernel:{op} or extern:{op}", back=1)
        statement.expect("(", "and the reads of the op")
        reads = [] if statement.peek_mark() == ")" else _names(statement)
        statement.expect(")", "after the reads")
        group, size = None, 0
        if statement.accept("@"):
            group = statement.take("word", "a group's name")
            if statement.accept("("):
                size = _integer(statement)
                statement.expect(")", "after the group's size")
        keys = _keys(statement)
        if group is None:
            for key in _COMM_KEYS & keys.keys():
                statement.fail(f"{key}= needs a group: write @dp before it")
        writes: Sequence[str] = names
        slots = [_default_buffer(kind, reads, names, at) for at in range(len(names))]
        estimate = None
        if statement.accept(":"):
            if statement.peek("word") == "none":
                statement.take("word")
                writes, slots = (), []
            elif statement.peek_mark() == "=" or _is_size(statement.peek("word")):
                slots = _slots(statement, names)
            estimate = _estimate(statement)
        for buffer in slots:
            self._add(statement, buffer)
        name = keys.get("node", [names[0]])[0]
        if name in self.node_names:
            statement.fail(f"a second node named {name}")
        self.node_names.add(name)
        self.reads += reads

        def make() -> Node:
            comm = None
            if group is not None:
                collective = keys.get("collective", [op])[0]
                moved = keys["moves"][0] if "moves" in keys else None
                comm = Comm(
                    collective,
                    default_comm_bytes(collective, reads, writes, _bytes_behind(self.buffers))
                    if moved is None
                    else parse_bytes(moved),
                    group,
                    size,
                    keys.get("dtype", [""])[0],
                    _ranks(keys.get("ranks", [])),
                    keys.get("unit", [""])[0],
                    int(keys.get("channels", ["0"])[0]),
                    keys.get("safe", ["no"])[0] == "yes",
                )
            return Node(
                name, kind, op, tuple(reads), tuple(writes), tuple(keys.get("mutates", ())),
                tuple(keys.get("after", ())), _work(keys), comm, estimate,
                parse_bytes(keys.get("scratch", ["0B"])[0]),
            )  # fmt: skip

        self.nodes.append(make)

    def _add(self, statement: _Statement, buffer: Buffer) -> None:
        if buffer.name in self.buffers:
            statement.fail(f"{buffer.name} is defined a second time")
        self.buffers[buffer.name] = buffer

    def schedule(self) -> Schedule:
        aliases = [buffer.alias_of for buffer in self.buffers.values() if buffer.alias_of is not None]
        for name in [*self.reads, *aliases]:
            if name not in self.buffers:
                self.buffers[name] = Buffer(name, 0, is_input=True)
        return Schedule(
            self.name, tuple(make() for make in self.nodes), self.buffers, tuple(self.outputs), self.budget_bytes
        )


_COMM_KEYS = frozenset({"dtype", "ranks", "unit", "channels", "safe", "collective", "moves"})
_WORK_KEYS = frozenset({"flops", "read", "write", "in", "form"})
_NUMBER_KEYS = frozenset({"flops", "channels"})
_KEYS = _COMM_KEYS | _WORK_KEYS | {"after", "mutates", "scratch", "node"}
_BYTE_KEYS = frozenset({"moves", "read", "write", "scratch"})


def _keys(statement: _Statement) -> dict[str, list[str]]:
    keys: dict[str, list[str]] = {}
    while (key := statement.peek("word")) is not None:
        if key not in _KEYS:
            statement.fail(unknown_name("key", key, _KEYS))
        statement.take("word")
        statement.expect("=", f"after {key}")
        if key in _BYTE_KEYS:
            keys[key] = [f"{_bytes(statement)}B"]
        elif key in _NUMBER_KEYS:
            keys[key] = [str(_integer(statement))]
        else:
            keys[key] = _names(statement)
    return keys


def _work(keys: dict[str, list[str]]) -> Work | None:
    if not _WORK_KEYS & keys.keys():
        return None
    return Work(
        int(keys.get("flops", ["0"])[0]),
        parse_bytes(keys.get("read", ["0B"])[0]),
        parse_bytes(keys.get("write", ["0B"])[0]),
        keys.get("in", [""])[0],
        keys.get("form", [""])[0],
    )


def _slots(statement: _Statement, names: Sequence[str]) -> list[Buffer]:
    """One size or alias for each of `names`."""
    slots: list[Buffer] = []
    for at, name in enumerate(names):
        if at:
            statement.expect(",", f"and the size of {name}")
        if statement.accept("="):
            slots.append(Buffer(name, 0, alias_of=statement.take("word", "the name it is an alias of")))
        else:
            slots.append(Buffer(name, _bytes(statement)))
    return slots


def _is_size(word: str | None) -> bool:
    return word is not None and _SIZE.fullmatch(word) is not None


_SIZE = re.compile(r"[0-9.]+([KMGT]i?)?B")


def _estimate(statement: _Statement) -> Estimate | None:
    word = statement.peek("word")
    if word is None:
        return None
    try:
        ns = parse_ns(word)
    except ConfigError as error:
        statement.fail(str(error))
    statement.take("word")
    source = statement.peek("source")
    if source is None:
        return Estimate(ns, "given")
    statement.take("source")
    return Estimate(ns, source[1:-1])


def _bytes(statement: _Statement) -> int:
    word = statement.peek("word")
    if word is None:
        statement.fail("expected a size")
    try:
        value = parse_bytes(word)
    except ConfigError as error:
        statement.fail(str(error))
    statement.take("word")
    return value


def _integer(statement: _Statement) -> int:
    word = statement.take("word", "a whole number")
    if not word.isdecimal():
        statement.fail(f"{word!r} is not a whole number", back=1)
    return int(word)


def _ranks(parts: Sequence[str]) -> tuple[int, ...]:
    ranks: list[int] = []
    for part in parts:
        low, _, high = part.partition("-")
        if not low.isdecimal() or (high and not high.isdecimal()):
            raise ScheduleError(f"ranks={','.join(parts)}: {part!r} is neither a rank nor a range like 0-7")
        ranks += range(int(low), int(high or low) + 1)
    return tuple(ranks)
