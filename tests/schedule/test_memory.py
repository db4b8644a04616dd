import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.errors import ScheduleError
from overlapc.schedule import dependencies
from overlapc.schedule.memory import GivenOrder, MemoryTimeline, Placing, analyze, lifetimes
from overlapc.schedule.text import parse
from tests.graphs import by_copies, schedules


def live(text):
    return analyze(parse(text)).during_bytes


def frees(text):
    return analyze(parse(text)).frees


def test_a_buffer_lives_from_its_producer_to_its_last_reader():
    text = "a = kernel() : 5B; b = kernel(a) : 3B; c = kernel(b) : 1B; return c"
    assert live(text) == (5, 8, 4)
    assert frees(text) == ((), ("a",), ("b",))


def test_views_take_nothing_and_keep_their_storage():
    text = "a = kernel() : 5B; v = view(a); b = kernel() : 1B; c = kernel(v)"
    assert live(text) == (5, 5, 6, 5)
    assert frees(text) == ((), (), ("b",), ("a", "c"))


def test_overwriting_is_a_rename():
    text = "a = kernel() : 5B; m = kernel(a) mutates=a : =a; c = kernel(m) : 1B; return c"
    assert live(text) == (5, 5, 6)
    assert frees(text)[-1] == ("a",)


def test_inputs_live_unless_they_may_be_freed():
    assert live("x = input : 4B; a = kernel(x) : 1B; b = kernel(a)") == (5, 5)
    assert live("x = input freeable : 4B; a = kernel(x) : 1B; b = kernel(a)") == (5, 1)


def test_buffers_in_flight_live_until_their_wait():
    text = "g = kernel() : 8B; rs = reduce_scatter(g) @dp : 2B; k = kernel() : 1B; w = wait(rs); return w"
    assert live(text) == (8, 10, 11, 10)
    assert frees(text) == ((), (), ("k",), ("g",))


def test_a_coalesced_start_may_have_a_wait_per_output():
    text = "a, b = all_gather(p, q) @dp : 2B, 3B; w = wait(a); x = kernel(w) : 1B; v = wait(b); y = kernel(v) : 1B"
    assert live(text) == (5, 5, 6, 5, 6 - 2)
    assert frees(text) == ((), (), ("x",), ("a",), ("b", "y"))


def test_a_start_without_a_wait_keeps_its_memory():
    assert frees("g = kernel() : 8B; rs = reduce_scatter(g) @dp : 2B; k = kernel()") == ((), (), ("k",))


def test_scratch_lives_while_its_node_runs():
    assert live("a = kernel() scratch=7B : 1B; b = kernel(a) : 2B") == (8, 3)


def test_outputs_are_never_freed_and_the_peak_has_a_position():
    profile = analyze(parse("a = kernel() : 5B; b = kernel(a) : 9B; c = kernel() : 1B; return a"))
    assert (profile.peak_bytes, profile.peak_at) == (14, 1)
    assert profile.frees == ((), ("b",), ("c",))


@given(schedules(), st.data())
@settings(max_examples=200)
def test_moves_update_memory_as_a_new_analysis_computes_it(schedule, data):
    """After every valid move of a block, live bytes and peak equal those of a new analysis."""
    timeline = MemoryTimeline(schedule)
    deps = dependencies.of(schedule)
    count = len(schedule.nodes)
    for _ in range(data.draw(st.integers(1, 6))):
        low = data.draw(st.integers(0, count - 1))
        high = data.draw(st.integers(low + 1, count))
        to = data.draw(st.integers(0, count - (high - low)))
        order = timeline.order[:low] + timeline.order[high:]
        order[to:to] = timeline.order[low:high]
        at = {node: position for position, node in enumerate(order)}
        if any(at[before] > at[after] for before, after in deps.why):
            continue
        first, last = min(low, to), max(high, to + high - low)
        promised = timeline.try_window(first, order[first:last])
        timeline.move(low, high, to)
        assert timeline.order == order
        fresh = analyze(schedule.replace_order(schedule.nodes[node].name for node in order))
        assert tuple(timeline.during_bytes) == fresh.during_bytes
        assert timeline.peak_bytes == fresh.peak_bytes
        assert promised == max(fresh.during_bytes[first:last])
        assert [timeline.position[node] for node in order] == list(range(count))


@given(schedules(), st.booleans())
@settings(max_examples=200)
def test_an_order_that_is_placed_node_by_node_has_the_peak_of_its_analysis(schedule, pooled):
    schedule = by_copies(schedule) if pooled else schedule
    placing, profile = Placing(schedule), analyze(schedule)
    for at in range(len(schedule.nodes)):
        assert placing.peak_at(at) <= profile.peak_bytes
        placing.place(at)
    assert placing.peak_with(0, 0) == profile.peak_bytes


def test_a_pool_adds_its_own_peak_to_that_of_other_memory():
    """The pool is largest at first, other memory at last: what comes first is planned with both in mind."""
    schedule = parse("""
        p = input : 0B; a = all_gather(p) @dp(2) via copy : 8B; w = wait(a); b = kernel(w) : 1B; c = kernel(b) : 5B
        return c
    """)
    assert (analyze(schedule).peak_bytes, analyze(schedule).pool_bytes) == (14, 8)
    placing = Placing(schedule)
    assert placing.peak_with(0, 0) == 6, "outside of the pool"
    assert placing.peak_at(0) == 14
    placing.reserve(0)
    assert placing.peak_at(2) == 14
    placing.reserve(0, -1)
    assert placing.peak_at(2) == 6


@given(schedules(), st.data(), st.booleans())
@settings(max_examples=100)
def test_the_rise_in_a_given_order_is_that_of_its_live_bytes(schedule, data, pooled):
    schedule = by_copies(schedule) if pooled else schedule
    low = data.draw(st.integers(0, len(schedule.nodes) - 1))
    high = data.draw(st.integers(low + 1, len(schedule.nodes)))
    profile, life = analyze(schedule), lifetimes(schedule)
    outside = [size - profile.pool_bytes for size in profile.during_bytes]
    new = life.allocates[low] - life.pool_allocates[low] + life.scratch[low]
    assert GivenOrder(schedule).rise(low, high) == [
        max(outside[low:high]) - (outside[low] - new),
        max(profile.pool_during_bytes[low:high]) - (profile.pool_during_bytes[low] - life.pool_allocates[low]),
    ]


def test_the_debug_mode_names_the_node_whose_bytes_are_wrong():
    schedule = parse("a = kernel() : 5B; b = kernel() : 3B; c = kernel(a) : 1B; return c")
    timeline = MemoryTimeline(schedule, check=True)
    timeline.move(1, 2, 2)
    timeline.outside.values[0] += 1
    with pytest.raises(ScheduleError, match="6 B are recorded as live at a, but 5 B are live"):
        timeline.apply(1, [1, 2])
