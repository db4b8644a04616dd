"""Slots: reused as soon as every rank has let go, never before. Each rule of `check` is broken once, and is noticed."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapc.runtime.copies.commands import HEAD_BYTES
from overlapc.runtime.copies.layout import Event, Slot, check, place


@st.composite
def programs(draw: st.DrawFn) -> list[Event]:
    """Starts and releases in any order that a program may have."""
    events: list[Event] = []
    open_: list[int] = []
    count = draw(st.integers(1, 12))
    started = 0
    while started < count or open_:
        if open_ and (started == count or draw(st.booleans())):
            events.append(Event(open_.pop(draw(st.integers(0, len(open_) - 1)))))
        else:
            events.append(Event(started, draw(st.integers(1, 5000))))
            open_.append(started)
            started += 1
    return events


@given(programs())
def test_every_layout_keeps_the_rules(events):
    slots, size = place(events)
    assert check(events, slots) is None
    assert size == max(slot.offset + slot.bytes for slot in slots)


def test_a_slot_is_used_again_when_it_is_released():
    a, b, c = Event(0, 1024), Event(1, 512), Event(2, 1024)
    slots, size = place([a, b, Event(0), c, Event(1), Event(2)])
    assert [slot.offset - HEAD_BYTES for slot in slots] == [0, 1024, 0]
    assert (slots[2].settled, slots[2].needed) == (0, 0)
    assert size == HEAD_BYTES + 1536
    # What is still held does not keep what came after it.
    slots, size = place([a, b, Event(1), Event(2, 512), Event(0), Event(2)])
    assert [slot.offset - HEAD_BYTES for slot in slots] == [0, 1024, 1024]
    assert size == HEAD_BYTES + 1536


EVENTS = [Event(0, 1024), Event(1, 512), Event(0), Event(2, 1024), Event(1), Event(2)]


@pytest.mark.parametrize(
    ("index", "change", "broken"),
    [
        (2, {"offset": 0}, "lies on the flags"),
        (1, {"offset": HEAD_BYTES}, "lies on 0, which is still read"),
        (2, {"needed": -1}, "does not wait until all ranks are done with 0"),
        (2, {"needed": 1}, "waits for release 1, which ranks have not done"),
        (2, {"settled": 1, "needed": 0}, "says that release 1 is done, which comes later"),
    ],
)
def test_a_broken_rule_is_noticed(index: int, change: dict[str, int], broken: str):
    slots: list[Slot] = list(place(EVENTS)[0])
    assert check(EVENTS, slots) is None
    slots[index] = replace(slots[index], **change)
    assert broken in (check(EVENTS, slots) or "")
