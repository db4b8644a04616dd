"""Slots of a graph's collectives in the memory that all ranks of a group share, and when each may be used again.

    start a; start b; release a; start c   ->   a at 0, b behind it, c at 0: needs all ranks to be done with a

A slot is taken at its start, and given back when the memory is no longer read *and* all collectives before it are
done with theirs: what a rank tells its peers is one number, up to which it is done with everything. That number goes
out with the next start, so no rank ever waits for what a peer does after that very start: no order of waits and
releases within a graph can make ranks wait for each other in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from overlapc.runtime.copies.commands import HEAD_BYTES, aligned


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one collective of a graph has its memory. `settled` and `needed` count the graph's own collectives from 0;
    -1 stands for all those before this run of the graph."""

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
    released: set[int] = set()
    settled = -1
    end = HEAD_BYTES
    for event in events:
        if event.bytes is None:
            released.add(event.index)
            while settled + 1 in released:
                settled += 1
            continue
        assert event.index == len(slots), "starts are numbered in their order"
        size = aligned(event.bytes)
        held = sorted((slot.offset, slot.offset + slot.bytes) for slot in slots[settled + 1 :])
        offset = _first_gap(held, size)
        overlapping = (at for at in range(settled, -1, -1) if _overlap(slots[at], offset, size))
        slots.append(Slot(offset, size, settled, next(overlapping, -1)))
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
    for event in events:
        if not event.is_start:
            open_slots.pop(event.index, None)
            continue
        slot = slots[event.index]
        if slot.offset < HEAD_BYTES:
            return f"collective {event.index} lies on the flags"
        for index, other in open_slots.items():
            if _overlap(other, slot.offset, slot.bytes):
                return f"collective {event.index} lies on {index}, which is still read"
        if slot.settled >= min(open_slots, default=event.index):
            return f"collective {event.index} says that {min(open_slots)} is done, which is still read"
        for index in range(slot.needed + 1, event.index):
            if _overlap(slots[index], slot.offset, slot.bytes):
                return f"collective {event.index} does not wait until all ranks are done with {index}, where it lies"
        if slot.needed > slot.settled:
            return f"collective {event.index} waits for {slot.needed}, which ranks have not said to be done by then"
        open_slots[event.index] = slot
    return None
