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
    layout = place(events)
    slots, size = layout.slots, layout.bytes
    assert check(events, layout) is None
    assert size == max(slot.offset + slot.bytes for slot in slots)


def test_a_slot_is_used_again_when_it_is_released():
    a, b, c = Event(0, 1024), Event(1, 512), Event(2, 1024)
    layout = place([a, b, Event(0), c, Event(1), Event(2)])
    slots, size = layout.slots, layout.bytes
    assert [slot.offset - HEAD_BYTES for slot in slots] == [0, 1024, 0]
    assert (slots[2].settled, slots[2].needed) == (0, 0)
    assert size == HEAD_BYTES + 1536
    # What is still held does not keep what came after it.
    layout = place([a, b, Event(1), Event(2, 512), Event(0), Event(2)])
    slots, size = layout.slots, layout.bytes
    assert [slot.offset - HEAD_BYTES for slot in slots] == [0, 1024, 1024]
    assert size == HEAD_BYTES + 1536


EVENTS = [Event(0, 1024), Event(1, 512), Event(0), Event(2, 1024), Event(1), Event(2)]


@pytest.mark.parametrize(
    ("index", "change", "broken"),
    [
        (2, {"offset": 0}, "has no room"),
        (2, {"bytes": 512}, "has no room"),
        (1, {"offset": HEAD_BYTES}, "lies on 0, which is still read"),
        (2, {"needed": -1}, "does not wait until all ranks are done with 0"),
        (2, {"needed": 1}, "waits for release 1, which ranks have not done"),
        (2, {"settled": 1, "needed": 0}, "says that 1 is released, which comes later"),
    ],
)
def test_a_broken_rule_is_noticed(index: int, change: dict[str, int], broken: str):
    layout = place(EVENTS)
    slots: list[Slot] = list(layout.slots)
    assert check(EVENTS, layout) is None
    slots[index] = replace(slots[index], **change)
    assert broken in (check(EVENTS, replace(layout, slots=tuple(slots))) or "")


@pytest.mark.parametrize(
    ("events", "broken"),
    [
        ([Event(0, 1024), Event(1, 512), Event(1), Event(0), Event(2, 1024), Event(2)], None),
        ([Event(0, 1024), Event(1, 512), Event(1), Event(2, 1024), Event(0), Event(2)], "lies on 0"),
        ([Event(0, 1024), Event(1, 512), Event(0), Event(2, 2048), Event(1), Event(2)], "has no room"),
        ([*EVENTS[:2], Event(0), Event(1)], "other collectives"),
    ],
)
def test_another_program_may_go_by_a_layout_if_it_lets_go_as_early(events: list[Event], broken: str | None):
    assert (broken or "") in (check(events, place(EVENTS)) or "")
    assert (broken is None) == (check(events, place(EVENTS)) is None)
