from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.errors import ScheduleError
from overlapc.schedule.model import Estimate
from overlapc.schedule.text import parse
from tests.graphs import order_of, reordered, schedules

TEXT = "ag0 = all_gather(%p0) @dp; %v = view(ag0); %w0 = wait(%v); %h = kernel(%x); %y = kernel(%h, %w0)"


def test_names_resolve_to_producers_readers_roots_starts_and_waits():
    schedule = parse(TEXT)
    assert schedule.producer("%p0") is None
    assert schedule.producer("%h").name == "%h"
    assert [node.name for node in schedule.readers("%w0")] == ["%y"]
    assert schedule.root("%w0") == "ag0"
    assert schedule.start_of("%w0").name == "ag0"
    assert schedule.wait_of("ag0").name == "%w0"
    assert schedule.first_reader("%w0").name == "%y"
    assert schedule.first_reader("%y") is None
    assert [node.name for node in (*schedule.starts(), *schedule.waits())] == ["ag0", "%w0"]


def test_a_name_that_is_not_there_offers_its_neighbours():
    with pytest.raises(ScheduleError, match="no node named 'ag1'; nearest: ag0"):
        parse(TEXT).node("ag1")
    with pytest.raises(ScheduleError, match="no buffer named"):
        parse(TEXT).producer("%zzz")


def test_moves_leave_the_old_schedule_alone():
    schedule = parse(TEXT)
    assert order_of(schedule.move("%w0", before="%y")) == ["ag0", "%v", "%h", "%w0", "%y"]
    assert order_of(schedule.move("%h", after="ag0")) == ["ag0", "%h", "%v", "%w0", "%y"]
    assert order_of(schedule) == ["ag0", "%v", "%w0", "%h", "%y"]
    assert schedule.move("%w0", before="%h") is schedule
    assert schedule.move("%w0", before="%w0") is schedule


def test_move_takes_one_position():
    with pytest.raises(ScheduleError, match="one of before= and after="):
        parse(TEXT).move("%h")


def test_an_order_that_lacks_a_node_is_refused():
    with pytest.raises(ScheduleError, match="4 names for 5 nodes"):
        parse(TEXT).replace_order(["ag0", "%v", "%w0", "%h"])


def test_estimates_are_set_by_name():
    schedule = parse(TEXT).with_estimates({"%h": Estimate(5.0, "measured")})
    assert schedule.node("%h").estimate == Estimate(5.0, "measured")
    assert schedule.node("%y").estimate is None


def test_a_wait_without_a_start_is_an_error():
    with pytest.raises(ScheduleError, match="waits for nothing"):
        parse("%w = wait(%x)").start_of("%w")


def test_names_are_defined_once():
    schedule = parse("a = kernel(x); b = kernel(a)")
    twice = type(schedule)("s", (*schedule.nodes, schedule.nodes[0]), schedule.buffers)
    with pytest.raises(ScheduleError, match="two nodes are named a"):
        twice.position("a")


@pytest.mark.parametrize("text", ["a = kernel(x) : =b; b = kernel(x) : =a", "a = view(b); b = wait(a)"])
def test_an_alias_of_itself_is_refused(text):
    with pytest.raises(ScheduleError, match="alias of itself"):
        parse(text).root("a")


@given(schedules(), st.data())
@settings(max_examples=100)
def test_a_reordered_schedule_answers_like_a_new_one(schedule, data):
    moved = data.draw(reordered(schedule))
    fresh = replace(moved, moved_from=None)
    assert moved.positions == fresh.positions
    assert moved.producers == fresh.producers
    assert moved.started == fresh.started
    assert list(moved.started) == list(fresh.started)
    for name in moved.buffers:
        assert moved.root(name) == fresh.root(name)
        assert moved.readers(name) == fresh.readers(name)
    for start in moved.starts():
        assert moved.wait_of(start) == fresh.wait_of(start)


def test_a_node_that_was_replaced_is_looked_at_again():
    """Cached answers of the schedule before the reordering are used only for nodes that did not change."""
    schedule = parse("g = all_gather(p) @dp; h = all_gather(q) @tp; w = wait(g); y = kernel(w)")
    moved = schedule.replace_order(["h", "g", "w", "y"])
    assert moved.start_of("w").name == "g"
    waits_for_h = replace(moved.node("w"), reads=("h",))
    other = replace(moved, nodes=(*moved.nodes[:2], waits_for_h, moved.nodes[3]))
    assert other.start_of("w").name == "h"
    assert other.wait_of("g") is None
