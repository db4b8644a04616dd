"""Slots of a graph's collectives in the memory that all ranks of a group share, and when each slot may be reused.

    start a; start b; release b; start c   ->   a at 0, b after it, c in the place of b once all ranks have released b

Every tensor has its own slot. The slot is taken when its collective starts, or earlier by a kernel that writes this
rank's part of the tensor there, and can be reused once the tensor is released, whatever other tensors are still held.
Releases are numbered in program order, like starts. With every start a rank tells its peers the last release that it
has completed, so no rank ever waits for something that a peer does after that same start. No order of waits and
releases within a graph can therefore deadlock the ranks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from overlapc.runtime.copies.commands import HEAD_BYTES, aligned


@dataclass(frozen=True, slots=True)
class Slot:
    """The memory of one tensor."""

    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Begin:
    """The release numbers that the start of one collective announces and waits for.

    Releases of the graph count from 0; -1 means all releases before this run of the graph.
    """

    tensors: tuple[int, ...]  # its results
    settled: int  # the last release that this rank has completed
    needed: int  # the release that all ranks must have completed before its slots may be overwritten


@dataclass(frozen=True, slots=True)
class Take:
    """The slot of a tensor is in use from here on."""

    tensor: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Start:
    """A collective begins, whose results have slots that are taken."""

    tensors: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Release:
    """No kernel launched from here on reads the tensor's slot."""

    tensor: int


# How many placements are tried for each initial order. Planned steps of 8 layers then take 2.6 to 11% more memory than
# is held at once; a single placement in program order took 17 to 23% more, and 20 placements take no less than 8.
TRIES = 8

Event = Take | Start | Release
"""An event of a program, in program order; tensors are numbered in the order of the starts that produce them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The slots of a graph's tensors, equal on all ranks. released: the tensors in the order of their releases."""

    slots: tuple[Slot, ...]
    begins: tuple[Begin, ...]
    released: tuple[int, ...]
    bytes: int  # of the whole memory, including the flags at its head


def place(events: Sequence[Event]) -> Layout:
    """Return a layout for these events."""
    return _placed(tuple(events))


@lru_cache(maxsize=16)  # an order is laid out to learn its peak, and once more when ranks agree on it
def _placed(events: tuple[Event, ...]) -> Layout:
    slots = _packed(events)
    needed: dict[int, int] = {}
    begins: list[Begin] = []
    released: dict[int, int] = {}  # tensor -> the number of its release
    for event in events:
        if isinstance(event, Release):
            released[event.tensor] = len(released)
        elif isinstance(event, Start):
            begins.append(Begin(event.tensors, len(released) - 1, max(needed[tensor] for tensor in event.tensors)))
        else:
            # the last release is looked at first: memory is often taken again soon after it was released
            over = (at for other, at in reversed(released.items()) if _overlap(slots[other], slots[event.tensor]))
            needed[event.tensor] = next(over, -1)
    end = max((slot.offset + slot.bytes for slot in slots.values()), default=HEAD_BYTES)
    return Layout(tuple(slots[tensor] for tensor in sorted(slots)), tuple(begins), tuple(released), end)


def _packed(events: Sequence[Event]) -> dict[int, Slot]:
    """Return slots in which tensors held at the same time do not overlap: the smallest of a few placements, or the
    first that takes no more memory than is held at once.

    A placement puts each tensor in turn at the lowest free offset. The initial orders are that of the takes, and
    largest first; for each next placement the tensor that ended highest moves before all that are held with it.
    """
    sizes: dict[int, int] = {}
    concurrent: dict[int, set[int]] = {}  # tensor -> the tensors that are held at the same time
    held: set[int] = set()
    lower_bound = 0
    for event in events:
        if isinstance(event, Take):
            sizes[event.tensor], concurrent[event.tensor] = aligned(event.bytes), set(held)
            for other in held:
                concurrent[other].add(event.tensor)
            held.add(event.tensor)
            lower_bound = max(lower_bound, HEAD_BYTES + sum(sizes[tensor] for tensor in held))
        elif isinstance(event, Release):
            held.discard(event.tensor)
    best: dict[int, Slot] = {}
    least = sum(sizes.values()) + HEAD_BYTES + 1
    for order in (list(sizes), sorted(sizes, key=lambda tensor: -sizes[tensor])):
        for _ in range(TRIES if sizes else 0):
            slots: dict[int, Slot] = {}
            for tensor in order:
                lower = sorted(
                    (slots[at].offset, slots[at].offset + slots[at].bytes) for at in concurrent[tensor] if at in slots
                )
                slots[tensor] = Slot(_first_gap(lower, sizes[tensor]), sizes[tensor])
            highest = max(order, key=lambda tensor: slots[tensor].offset + slots[tensor].bytes)
            end = slots[highest].offset + slots[highest].bytes
            if end < least:
                best, least = slots, end
            if least == lower_bound:
                return best
            order.remove(highest)
            order.insert(next((at for at, other in enumerate(order) if other in concurrent[highest]), 0), highest)
    return best


def common(programs: Sequence[Sequence[Event]]) -> Layout:
    """Return one layout for the programs of all ranks of a group.

    It is the layout of one of the programs if that is valid for all, else one in which no memory is reused. Starts and
    sizes are the same on all ranks, but kernels may be grouped into launches differently.
    """
    different = {tuple(events): None for events in programs}
    for events in different:
        layout = place(events)
        if all(check(other, layout) is None for other in different):
            return layout
    return _without_reuse(programs[0])


def _without_reuse(events: Sequence[Event]) -> Layout:
    sizes = {event.tensor: aligned(event.bytes) for event in events if isinstance(event, Take)}
    slots: list[Slot] = []
    end = HEAD_BYTES
    for tensor in sorted(sizes):
        slots.append(Slot(end, sizes[tensor]))
        end += sizes[tensor]
    begins = [Begin(event.tensors, -1, -1) for event in events if isinstance(event, Start)]
    return Layout(tuple(slots), tuple(begins), tuple(sorted(sizes)), end)


def to_text(events: Sequence[Event]) -> str:
    """Return the events as text, to send to other ranks."""
    return json.dumps([[type(event).__name__, *(getattr(event, name) for name in event.__slots__)] for event in events])


def from_text(text: str) -> list[Event]:
    """Return the events of a text that `to_text` made."""
    found: list[Event] = []
    for name, *values in json.loads(text):
        match name, values:
            case "Take", [tensor, size]:
                found.append(Take(tensor, size))
            case "Start", [tensors]:
                found.append(Start(tuple(tensors)))
            case _, [tensor]:
                found.append(Release(tensor))
    return found


def _first_gap(held: Sequence[tuple[int, int]], size: int) -> int:
    """Return the lowest offset after the head at which `size` bytes overlap none of the sorted ranges `held`."""
    offset = HEAD_BYTES
    for begin, end in held:
        if begin - offset >= size:
            break
        offset = max(offset, end)
    return offset


def _overlap(one: Slot, other: Slot) -> bool:
    return one.offset < other.offset + other.bytes and other.offset < one.offset + one.bytes


def check(events: Sequence[Event], layout: Layout) -> str | None:
    """Return the first rule that a program breaks in a layout, in words, or None if it breaks none.

    The check does not use `place`, which may have made the layout for another program with the same collectives, such
    as that of ranks with other batches.
    """
    slots, open_slots, closed = layout.slots, dict[int, Slot](), set[int]()
    starts = [event.tensors for event in events if isinstance(event, Start)]
    takes = sorted(event.tensor for event in events if isinstance(event, Take))
    if starts != [begin.tensors for begin in layout.begins] or takes != sorted(layout.released):
        return "the program has other collectives"
    begins = iter(layout.begins)
    settled = 0  # how many of the layout's first releases have been done
    for event in events:
        if isinstance(event, Release):
            open_slots.pop(event.tensor, None)
            closed.add(event.tensor)
            while settled < len(layout.released) and layout.released[settled] in closed:
                settled += 1
        elif isinstance(event, Take):
            slot = slots[event.tensor]
            if slot.offset < HEAD_BYTES or slot.offset + event.bytes > layout.bytes or event.bytes > slot.bytes:
                return f"tensor {event.tensor} has no room"
            for tensor, other in open_slots.items():
                if _overlap(other, slot):
                    return f"tensor {event.tensor} lies on {tensor}, which is still read"
            open_slots[event.tensor] = slot
        else:
            broken = _broken_begin(event, next(begins), layout, closed, settled)
            if broken is not None:
                return broken
    return None


def _broken_begin(event: Start, begin: Begin, layout: Layout, closed: set[int], settled: int) -> str | None:
    """Return the rule that a start breaks, or None, if the tensors `closed` have been released, among them the first
    `settled` of the layout's releases."""
    if begin.needed > begin.settled:
        return f"{event} waits for release {begin.needed}, which ranks have not done by then"
    if begin.settled >= settled:
        return f"{event} says that {layout.released[settled]} is released, which comes later"
    for other in layout.released[begin.needed + 1 :]:
        for tensor in event.tensors:
            if other in closed and _overlap(layout.slots[other], layout.slots[tensor]):
                return f"{event} does not wait until all ranks are done with {other}, where {tensor} lies"
    return None
