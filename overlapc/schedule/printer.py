"""Prints schedules in the format of `schedule.text`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from overlapc.errors import ScheduleError
from overlapc.schedule.model import Buffer, Node, Origin, Schedule
from overlapc.schedule.syntax import WORD, default_buffer, default_bytes, default_kind
from overlapc.units import format_bytes, format_ns


def print_schedule(schedule: Schedule) -> str:
    """Return the text of a schedule, ending with a newline. ScheduleError if the format cannot express the schedule."""
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
    """Return the statement of one node, without its origin."""
    names, head, tail, _ = _row(schedule, node)
    return f"{names} = {head}" + (f" : {tail}" if tail else "")


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
    if default_kind(node.op) is not node.kind:
        op = f"{node.kind.value}:{op}"
    words = [f"{op}({', '.join(map(_quote, node.reads))})"]
    comm, work = node.comm, node.work
    if comm is not None:
        words.append(f"@{_quote(comm.group)}" + (f"({comm.size})" if comm.size else ""))
        words += [f"via {comm.via}"] if comm.via else []
        words += _pairs(
            collective="" if comm.collective == node.op else _quote(comm.collective),
            dtype=_quote(comm.dtype) if comm.dtype else "",
            ranks=_ranges(comm.ranks),
            unit=_quote(comm.unit) if comm.unit else "",
            channels=str(comm.channels) if comm.channels else "",
            variant=_quote(comm.variant) if comm.variant else "",
            safe="yes" if comm.safe else "",
        )
        if comm.bytes != default_bytes(comm.collective, node.reads, node.writes, schedule.buffers):
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
    expected = [default_buffer(node.kind, node.reads, node.writes, at) for at in range(len(node.writes))]
    parts = []
    if not node.writes:
        parts.append("none")
    elif buffers != expected:
        parts.append(", ".join(map(_slot, buffers)))
    if node.estimate is not None:
        source = node.estimate.source
        quoted = json.dumps(source) if "]" in source or "\n" in source or source.startswith('"') else source
        parts.append(format_ns(node.estimate.ns) + ("" if source == "given" else f" [{quoted}]"))
    return "  ".join(parts)


def _origin(origin: Origin) -> str:
    """Return `mm_3 | layers.0 | model.py:31: x @ w`, with empty fields for unknown parts."""
    parts = (" ".join(origin.fx), origin.module, origin.source)
    return (" | ".join(parts) if any(parts[1:]) else parts[0]).replace("\n", " ")


def _pairs(**values: str) -> list[str]:
    return [f"{key}={value}" for key, value in values.items() if value]


def _slot(buffer: Buffer) -> str:
    return format_bytes(buffer.bytes) if buffer.alias_of is None else f"={_quote(buffer.alias_of)}"


def _quote(name: str) -> str:
    return name if WORD.fullmatch(name) else json.dumps(name)


def _ranges(ranks: Sequence[int]) -> str:
    """Return `0-3,8` for (0, 1, 2, 3, 8); the parser restores the same order."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def _column(cells: Sequence[str], step: int, most: int) -> int:
    """Return the width of a column, rounded up: one longer cell then rarely changes all other lines of a diff."""
    widest = max((len(cell) for cell in cells), default=0)
    return min(most, -(-widest // step) * step)
