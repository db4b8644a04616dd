"""Words and defaults of the text format of schedules, shared by printer and parser."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from overlapc.errors import ScheduleError
from overlapc.schedule import collective_kinds
from overlapc.schedule.model import Buffer, Kind

KINDS = {kind.value: kind for kind in Kind}
WORD = re.compile(r"[%\w.$/+-]+")  # a name that needs no quotes
_ALIASING = (Kind.WAIT, Kind.VIEW)


def default_kind(op: str) -> Kind | None:
    """Return the kind of a node whose statement names only its op; None for an op that needs a KIND: prefix."""
    return Kind.START if op in collective_kinds.KINDS else KINDS.get(op)


def default_buffer(kind: Kind, reads: Sequence[str], writes: Sequence[str], at: int) -> Buffer:
    """Return the buffer `writes[at]` of a node without sizes: waits and views define aliases of what they read."""
    if kind in _ALIASING and reads:
        return Buffer(writes[at], 0, alias_of=reads[at if len(reads) == len(writes) else 0])
    return Buffer(writes[at], 0)


def default_bytes(collective: str, reads: Sequence[str], writes: Sequence[str], buffers: Mapping[str, Buffer]) -> int:
    """Return the bytes of a collective by its definition (see `Comm`): of the storages that it reads or writes."""
    kind = collective_kinds.KINDS.get(collective)
    return sum(_storage_bytes(name, buffers) for name in (writes if kind is not None and kind.output_sized else reads))


def _storage_bytes(name: str, buffers: Mapping[str, Buffer]) -> int:
    for _ in range(len(buffers)):
        buffer = buffers[name]
        if buffer.alias_of is None:
            return buffer.bytes
        name = buffer.alias_of
    raise ScheduleError(f"{name} is an alias of itself")
