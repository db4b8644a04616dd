"""Slots of a graph's collectives in the memory that all ranks of a group share, and when each may be used again.

    start a; start b; release b; start c   ->   a at 0, b behind it, c where b was: needs all ranks to have let go of b

Releases are numbered in the order of the program, like starts. A slot is taken at its start, and free for others when
it is released, whatever else is still held. A rank tells its peers with every start which release it has done last, so
no rank ever waits for what a peer does after that very start: no order of waits and releases within a graph can make
ranks wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlapc.runtime.copies.commands import HEAD_BYTES, aligned


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one collective of a graph has its memory. `settled` and `needed` are releases of the graph, from 0; -1
    stands for all those before this run of the graph."""

    offset: int
    bytes: int
    settled: int
    needed: int


@dataclass(frozen=True, slots=True)
class Event:
    """A start (`bytes` of slot that it takes) or a release of collective `index`, in the order of the program."""

    index: int
    bytes: int | None = None  # None: a release

    @property
    def is_start(self) -> bool:
        return self.bytes is not None


def place(events: Sequence[Event]) -> tuple[tuple[Slot, ...], int]:
    """(the slot of each collective, the bytes of the whole memory with its head)."""
    slots: list[Slot] = []
    released: dict[int, int] = {}  # collective -> the number of its release
    end = HEAD_BYTES
    for event in events:
        if event.bytes is None:
            released[event.index] = len(released)
            continue
        assert event.index == len(slots), "starts are numbered in their order"
        size = aligned(event.bytes)
        held = sorted((slot.offset, slot.offset + slot.bytes) for at, slot in enumerate(slots) if at not in released)
        offset = _first_gap(held, size)
        needed = max((released[at] for at, slot in enumerate(slots) if _overlap(slot, offset, size)), default=-1)
        slots.append(Slot(offset, size, len(released) - 1, needed))
        end = max(end, offset + size)
    return tuple(slots), end


def _first_gap(held: Sequence[tuple[int, int]], size: int) -> int:
    """The lowest offset behind the head at which `size` bytes overlap none of `held`, which are in order."""
    offset = HEAD_BYTES
    for begin, end in held:
        if begin - offset >= size:
            break
        offset = max(offset, end)
    return offset


def _overlap(slot: Slot, offset: int, size: int) -> bool:
    return slot.offset < offset + size and offset < slot.offset + slot.bytes


def check(events: Sequence[Event], slots: Sequence[Slot]) -> str | None:
    """The first rule that a layout breaks, in words; None if it breaks none. Written without looking at `place`."""
    open_slots: dict[int, Slot] = {}
    closed: list[int] = []
    for event in events:
        if not event.is_start:
            open_slots.pop(event.index, None)
            closed.append(event.index)
            continue
        slot = slots[event.index]
        if slot.offset < HEAD_BYTES:
            return f"collective {event.index} lies on the flags"
        for index, other in open_slots.items():
            if _overlap(other, slot.offset, slot.bytes):
                return f"collective {event.index} lies on {index}, which is still read"
        if slot.settled >= len(closed):
            return f"collective {event.index} says that release {slot.settled} is done, which comes later"
        for index in closed[slot.needed + 1 :]:
            if _overlap(slots[index], slot.offset, slot.bytes):
                return f"collective {event.index} does not wait until all ranks are done with {index}, where it lies"
        if slot.needed > slot.settled:
            return f"collective {event.index} waits for release {slot.needed}, which ranks have not done by then"
        open_slots[event.index] = slot
    return None
