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


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of a graph's collectives, the same on all ranks. released: collectives in order of their release."""

    slots: tuple[Slot, ...]
    released: tuple[int, ...]
    bytes: int  # of the whole memory with its head


def place(events: Sequence[Event]) -> Layout:
    """A layout for these starts and releases."""
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
    return Layout(tuple(slots), tuple(released), end)


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


def check(events: Sequence[Event], layout: Layout) -> str | None:
    """The first rule that a program breaks in a layout, in words; None if it breaks none. Written without looking at
    `place`, which may have made it for another program of the same collectives: that of ranks with other batches."""
    slots, open_slots, closed = layout.slots, dict[int, Slot](), set[int]()
    if sorted(layout.released) != list(range(len(slots))) or sum(event.is_start for event in events) != len(slots):
        return "it is of other collectives"
    for event in events:
        if event.bytes is None:
            open_slots.pop(event.index, None)
            closed.add(event.index)
            continue
        slot = slots[event.index]
        if slot.offset < HEAD_BYTES or slot.offset + event.bytes > layout.bytes or event.bytes > slot.bytes:
            return f"collective {event.index} has no room"
        for index, other in open_slots.items():
            if _overlap(other, slot.offset, slot.bytes):
                return f"collective {event.index} lies on {index}, which is still read"
        for index in layout.released[: slot.settled + 1]:
            if index not in closed:
                return f"collective {event.index} says that {index} is released, which comes later"
        for index in layout.released[slot.needed + 1 :]:
            if index < event.index and _overlap(slots[index], slot.offset, slot.bytes):
                return f"collective {event.index} does not wait until all ranks are done with {index}, where it lies"
        if slot.needed > slot.settled:
            return f"collective {event.index} waits for release {slot.needed}, which ranks have not done by then"
        open_slots[event.index] = slot
    return None
