import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.errors import ScheduleError
from overlapc.schedule import dependencies
from overlapc.schedule.dependencies import Why
from overlapc.schedule.text import parse
from tests.graphs import reordered, schedules


def edges_of(schedule):
    return {
        (schedule.nodes[before].name, schedule.nodes[after].name): why
        for before, after, why in dependencies.of(schedule).edges()
    }


def edges(text):
    return edges_of(parse(text))


def test_readers_follow_producers():
    assert edges("a = kernel(x); b = kernel(a, x)") == {("a", "b"): Why.DATA}


def test_overwriting_follows_earlier_readers_of_any_alias():
    found = edges("v = view(x); r = kernel(v); m = kernel(x) mutates=x : =x; s = kernel(m)")
    assert found["r", "m"] is Why.MUTATION
    assert found["v", "m"] is Why.MUTATION
    assert found["m", "s"] is Why.DATA


def test_a_later_reader_of_an_alias_follows_the_overwriting():
    found = edges("v = view(x); m = kernel(x) mutates=x : =x; s = kernel(v)")
    assert found["m", "s"] is Why.MUTATION


def test_a_buffer_in_flight_is_overwritten_after_its_wait():
    found = edges("s = reduce_scatter(x) @dp; w = wait(s); m = kernel(x) mutates=x : =x")
    assert found["w", "m"] is Why.MUTATION


def test_a_collective_in_place_is_done_at_its_wait():
    found = edges("r = kernel(x); s = all_reduce(x) @dp mutates=x : =x; w = wait(s); late = kernel(x)")
    assert found["r", "s"] is Why.MUTATION
    assert found["w", "late"] is Why.MUTATION


def test_starts_of_a_group_keep_their_order():
    found = edges("a = all_gather(x) @dp; t = all_gather(x) @tp; b = all_gather(x) @dp")
    assert found == {("a", "b"): Why.COLLECTIVE_ORDER}


def test_nothing_that_communicates_crosses_unknown_communication():
    found = edges("a = all_gather(x) @dp; c = comm:send(y) @pp; w = wait(a); b = all_gather(x) @dp; k = kernel(x)")
    assert found["a", "c"] is Why.BARRIER
    assert found["c", "w"] is Why.BARRIER
    assert found["c", "b"] is Why.BARRIER
    assert not any("k" in edge for edge in found)


def test_unknown_communication_keeps_its_order():
    assert edges("a = comm:send(x) @pp; b = comm:receive(y) @pp") == {("a", "b"): Why.BARRIER}


def test_safe_communication_keeps_its_order_only_within_its_group():
    found = edges("a = all_gather(x) @dp; t = all_gather(x) @tp; c = comm:swap(y) @tp safe=yes; b = all_gather(x) @dp")
    assert found == {("a", "b"): Why.COLLECTIVE_ORDER, ("t", "c"): Why.COLLECTIVE_ORDER}


def test_weak_edges_are_dependences():
    assert edges("a = kernel(x); b = kernel(x) after=a") == {("a", "b"): Why.AFTER}


def test_an_unknown_name_in_after_is_an_error():
    with pytest.raises(ScheduleError, match="b comes after aa: no node named 'aa'; nearest: a"):
        edges("a = kernel(x); b = kernel(x) after=aa")


def test_a_reordering_defines_the_new_order_of_collectives():
    before = parse("a = all_gather(x) @dp; b = all_gather(x) @dp; k = kernel(x); c = all_gather(k) @dp")
    after = before.replace_order(("k", "c", "b", "a"), reorder_collectives=True)
    found = {
        (after.nodes[early].name, after.nodes[late].name): why for early, late, why in dependencies.of(after).edges()
    }
    order = Why.COLLECTIVE_ORDER
    assert found == {("k", "c"): Why.DATA, ("c", "b"): order, ("b", "a"): order}


@given(schedules(), st.data())
@settings(max_examples=100)
def test_moving_nodes_does_not_change_what_depends_on_what(schedule, data):
    moved = data.draw(reordered(schedule))
    assert edges_of(moved) == edges_of(schedule)
    deps = dependencies.of(moved)
    assert {(before, after) for after, preds in enumerate(deps.preds) for before in preds} == deps.why.keys()
    assert {(before, after) for before, succs in enumerate(deps.succs) for after in succs} == deps.why.keys()
