"""Slots of a pool are reused as soon as every rank has released them, and never before. `check` notices each broken
rule."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from overlapc.runtime.copies.commands import HEAD_BYTES
from overlapc.runtime.copies.layout import (
    Event,
    Release,
    Start,
    Take,
    _first_gap,
    check,
    common,
    from_text,
    place,
    to_text,
)


@st.composite
def programs(draw: st.DrawFn) -> list[Event]:
    """Draw the events of a program: slots taken at or before a start, and released, in any valid order."""
    events: list[Event] = []
    bring = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(1, 8)))]
    tensors = [tuple(range(sum(bring[:at]), sum(bring[: at + 1]))) for at in range(len(bring))]
    untaken = {tensor for each in tensors for tensor in each}
    open_: list[int] = []

    def take(tensor: int) -> None:
        untaken.discard(tensor)
        events.append(Take(tensor, draw(st.integers(1, 5000))))

    while tensors or open_:
        what = draw(st.sampled_from(("ahead", "start", "release")))
        if what == "ahead" and tensors and untaken:
            take(draw(st.sampled_from(sorted(untaken))))
        elif open_ and (what == "release" or not tensors):
            events.append(Release(open_.pop(draw(st.integers(0, len(open_) - 1)))))
        elif tensors:
            for tensor in tensors[0]:
                if tensor in untaken:
                    take(tensor)
            events.append(Start(tensors[0]))
            open_ += tensors.pop(0)
    return events


@given(programs())
def test_every_layout_passes_the_check(events):
    layout = place(events)
    assert check(events, layout) is None
    assert layout.bytes == max(slot.offset + slot.bytes for slot in layout.slots)


def a_start(tensor: int, size_bytes: int) -> list[Event]:
    return [Take(tensor, size_bytes), Start((tensor,))]


def test_a_slot_is_reused_when_it_is_released():
    a, b, c = a_start(0, 1024), a_start(1, 512), a_start(2, 1024)
    layout = place([*a, *b, Release(0), *c, Release(1), Release(2)])
    assert [slot.offset - HEAD_BYTES for slot in layout.slots] == [0, 1024, 0]
    assert (layout.begins[2].settled, layout.begins[2].needed) == (0, 0)
    assert layout.bytes == HEAD_BYTES + 1536
    # A slot that is still held does not prevent the reuse of later slots.
    layout = place([*a, *b, Release(1), *a_start(2, 512), Release(0), Release(2)])
    assert [slot.offset - HEAD_BYTES for slot in layout.slots] == [0, 1024, 1024]
    assert layout.bytes == HEAD_BYTES + 1536


def test_a_slot_may_be_taken_before_its_start_which_says_what_was_released_since():
    layout = place([*a_start(0, 1024), Take(1, 512), Release(0), Take(2, 512), Start((1, 2)), Release(2), Release(1)])
    assert [slot.offset - HEAD_BYTES for slot in layout.slots] == [0, 1024, 0]
    assert (layout.begins[1].settled, layout.begins[1].needed) == (0, 0)


def test_no_placement_is_tried_after_one_without_gaps(monkeypatch: pytest.MonkeyPatch):
    placed = []

    def first_gap(held: list[tuple[int, int]], size: int) -> int:
        placed.append(size)
        return _first_gap(held, size)

    monkeypatch.setattr("overlapc.runtime.copies.layout._first_gap", first_gap)
    place([*a_start(0, 4096), *a_start(1, 512), *a_start(2, 2048), Release(2), Release(1), Release(0)])
    assert placed == [4096, 512, 2048]


EVENTS = [*a_start(0, 1024), *a_start(1, 512), Release(0), *a_start(2, 1024), Release(1), Release(2)]


@pytest.mark.parametrize(
    ("index", "change", "broken"),
    [
        (2, {"offset": 0}, "has no room"),
        (2, {"bytes": 512}, "has no room"),
        (1, {"offset": HEAD_BYTES}, "lies on 0, which is still read"),
        (2, {"needed": -1}, "does not wait until all ranks are done with 0"),
        (2, {"needed": 1}, "waits for release 1, which ranks have not done"),
        (2, {"settled": 1, "needed": 0}, "says that 1 is released, which comes later"),
        (2, {"tensors": (1,)}, "other collectives"),
    ],
)
def test_a_broken_rule_is_noticed(index: int, change: dict[str, Any], broken: str):
    layout = place(EVENTS)
    slots, begins = list(layout.slots), list(layout.begins)
    assert check(EVENTS, layout) is None
    if {"offset", "bytes"} & change.keys():
        slots[index] = replace(slots[index], **change)
    else:
        begins[index] = replace(begins[index], **change)
    assert broken in (check(EVENTS, replace(layout, slots=tuple(slots), begins=tuple(begins))) or "")


@pytest.mark.parametrize(
    ("events", "broken"),
    [
        ([*EVENTS[:4], Release(1), Release(0), *a_start(2, 1024), Release(2)], None),
        ([*EVENTS[:4], Release(1), *a_start(2, 1024), Release(0), Release(2)], "lies on 0"),
        ([*EVENTS[:4], Release(0), *a_start(2, 2048), Release(1), Release(2)], "has no room"),
        ([*EVENTS[:4], Release(0), Release(1)], "other collectives"),
    ],
)
def test_another_program_may_use_a_layout_if_it_releases_slots_as_early(events: list[Event], broken: str | None):
    assert (broken or "") in (check(events, place(EVENTS)) or "")
    assert (broken is None) == (check(events, place(EVENTS)) is None)


@given(programs())
def test_events_as_text_are_the_same(events):
    assert from_text(to_text(events)) == events


def test_ranks_whose_launches_differ_use_a_layout_that_is_valid_for_all():
    early = [*EVENTS[:4], Release(0), Release(1), *a_start(2, 1024), Release(2)]
    assert common([early, EVENTS]) == common([EVENTS, early]) == place(EVENTS)
    late = [*EVENTS[:4], *a_start(2, 1024), Release(1), Release(2), Release(0)]
    other = [*EVENTS[:4], *a_start(2, 1024), Release(0), Release(1), Release(2)]
    layout = common([late, other, EVENTS])
    assert [check(events, layout) for events in (late, other, EVENTS)] == [None, None, None]
    assert layout.bytes == HEAD_BYTES + 1024 + 512 + 1024
