from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context
from overlapc.passes.plan_overlap import plan_overlap
from overlapc.schedule.memory import RangeMax
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse
from tests.graphs import by_copies, check_invariants, check_pass, order_of, peak, schedules

ROOMY = Context(reorder_collectives=True, budget_bytes=1000)


def planned(text: str, ctx: Context = ROOMY) -> tuple[Schedule, dict[str, str]]:
    schedule = parse(text)
    moved, report = plan_overlap(schedule, ctx)
    check_invariants(schedule, moved, ctx)
    return moved, report.reasons


STEP = """
    k = kernel(x) : 0B 90us; rs = reduce_scatter(k) @dp : 0B 60us; s = wait(rs)
    ag = all_gather(p) @dp : 8B 60us; w = wait(ag); y = kernel(k, w) : 0B 90us; return s
"""


def test_a_gather_goes_ahead_of_a_reduction_that_is_not_urgent():
    check_pass(
        plan_overlap,
        before=STEP,
        after="""
            ag = all_gather(p) @dp; k = kernel(x); rs = reduce_scatter(k) @dp; w = wait(ag); y = kernel(k, w)
            s = wait(rs)
        """,
        reasons={"ag": "hidden", "s": "end of schedule"},
        ctx=ROOMY,
    )


def test_moves_of_starts_and_waits_are_counted():
    _, report = plan_overlap(parse(STEP), ROOMY)
    assert report.moves == {"ag": 3, "rs": 1, "s": 3, "w": 1}


def test_nothing_moves_where_collectives_may_not_pass_each_other():
    schedule = parse(STEP)
    assert plan_overlap(schedule, Context(budget_bytes=1000))[0] is schedule


CHAIN = """
    a = kernel(x) : 0B 100us; b = kernel(a) : 0B 100us; c = kernel(b) : 0B 100us
    ag = all_gather(p) @dp : 8B 80us; w = wait(ag); y = kernel(c, w) : 0B 9us
"""


@pytest.mark.parametrize(("margin", "behind"), [(1.0, "b"), (1.2, "b"), (1.5, "a"), (2.6, None)])
def test_the_margin_says_how_far_ahead_a_gather_starts(margin, behind):
    moved, _ = planned(CHAIN, replace(ROOMY, overlap_margin=margin))
    before = order_of(moved).index("ag")
    assert (order_of(moved)[before - 1] if before else None) == behind


def test_gathers_start_early_enough_to_leave_time_for_later_ones():
    """Each alone could start one kernel earlier, but the queue runs them one after the other."""
    moved, _ = planned("""
        a = kernel(x) : 0B 100us; b = kernel(a) : 0B 100us
        g = all_gather(p) @dp : 8B 90us; u = wait(g); y = kernel(b, u) : 0B 1us
        h = all_gather(q) @dp : 8B 90us; v = wait(h); z = kernel(y, v) : 0B 1us
    """)
    assert order_of(moved)[:2] == ["g", "a"]
    assert simulate(moved).exposed_ns == 0


def test_the_gather_that_is_needed_first_starts_first():
    moved, _ = planned("""
        g = all_gather(p) @dp : 8B 50us; h = all_gather(q) @dp : 8B 50us; a = kernel(x) : 0B 50us
        v = wait(h); y = kernel(v, a) : 0B 50us; u = wait(g); z = kernel(u, y) : 0B 50us
    """)
    assert [node.name for node in moved.starts()] == ["h", "g"]
    assert simulate(moved).exposed_ns == 0


def test_a_gather_is_needed_at_its_first_reader_not_at_its_wait():
    moved, _ = planned("""
        g = all_gather(p) @dp : 8B 50us; u = wait(g); h = all_gather(q) @dp : 8B 50us; v = wait(h)
        a = kernel(x) : 0B 50us; y = kernel(v, a) : 0B 50us; z = kernel(u, y) : 0B 50us
    """)
    assert [node.name for node in moved.starts()] == ["h", "g"]


def test_casts_and_views_move_with_a_gather_and_compute_does_not():
    text = "a = kernel(x) : 0B 100us; c = {} : 0B {}us; g = all_gather(c) @dp : 8B 80us; w = wait(g); y = kernel(a, w)"
    assert order_of(planned(text.format("kernel(p)", 5))[0])[:2] == ["c", "g"]
    assert order_of(planned(text.format("kernel(p)", 60))[0])[0] == "a"
    assert order_of(planned(text.format("kernel(a)", 5))[0])[0] == "a"


def test_memory_holds_a_gather_back_until_there_is_room():
    text = """
        a = kernel(x) : 0B 100us; b = kernel(a) : 90B 100us; c = kernel(b) : 0B 100us; d = kernel(c) : 0B 50us
        ag = all_gather(p) @dp : 20B 80us; w = wait(ag); y = kernel(d, w) : 0B 9us
    """
    early = replace(ROOMY, overlap_margin=2.0)
    assert order_of(planned(text, replace(early, budget_bytes=110))[0])[:4] == ["a", "ag", "b", "c"]
    moved, reasons = planned(text, replace(early, budget_bytes=100))
    assert order_of(moved)[:4] == ["a", "b", "c", "ag"]
    assert simulate(moved).exposed_ns == 30e3
    assert reasons["ag"] == "start of schedule"  # it is already late when there is room


def test_a_gather_goes_ahead_of_a_reduction_that_would_delay_it():
    moved, _ = planned("""
        k = kernel(x) : 0B 90us; rs = reduce_scatter(k) @dp : 0B 200us; s = wait(rs); m = kernel(k) : 0B 100us
        ag = all_gather(p) @dp : 8B 60us; w = wait(ag); y = kernel(m, w) : 0B 300us; return s
    """)
    assert order_of(moved) == ["k", "ag", "rs", "m", "w", "y", "s"]


def test_a_barrier_stops_a_gather():
    moved, _ = planned(
        CHAIN.replace("c = kernel(b)", "k = comm:send(b) @pp; c = kernel(b)"), replace(ROOMY, overlap_margin=9.0)
    )
    assert order_of(moved).index("ag") > order_of(moved).index("k")


def test_an_all_reduce_starts_when_the_reduce_scatter_before_it_is_done():
    """Neither delays compute, and the all-reduce does not wait until the end of the step."""
    moved, _ = planned("""
        g = kernel(x) : 8B 50us; rs = reduce_scatter(g) @dp : 4B 60us; s = wait(rs)
        ar = all_reduce(s) @replicate : 4B 40us; t = wait(ar)
        a = kernel(x) : 0B 50us; b = kernel(a) : 0B 50us; c = kernel(b) : 0B 50us; return t
    """)
    assert order_of(moved) == ["g", "rs", "a", "b", "s", "ar", "c", "t"]
    assert simulate(moved).exposed_ns == 0


def test_a_gather_goes_ahead_of_a_reduction_that_waited_for_another():
    """Once `a` is done `b` could start, but `g` behind it would end 30us too late."""
    moved, _ = planned("""
        k = kernel(x) : 0B 90us; a = all_reduce(k) @dp : 0B 30us; s = wait(a)
        b = reduce_scatter(s) @dp : 0B 60us; t = wait(b); l = kernel(k) : 0B 90us; m = kernel(l) : 0B 90us
        g = all_gather(p) @dp : 8B 60us; w = wait(g); y = kernel(m, w) : 0B 300us; return t
    """)
    assert order_of(moved) == ["k", "a", "l", "g", "s", "b", "m", "w", "y", "t"]
    assert simulate(moved).exposed_ns == 0


def test_gathers_of_the_next_layer_go_ahead_of_this_layers_reduction():
    layers = 6
    text = "x0 = kernel(x) : 8B 10us\n" + "\n".join(
        f"g{at} = all_gather(p{at}) @dp : 8B 30us; w{at} = wait(g{at}); x{at + 1} = kernel(x{at}, w{at}) : 8B 100us\n"
        f"d{at} = kernel(x{at + 1}) : 16B 10us; r{at} = reduce_scatter(d{at}) @dp : 4B 50us; s{at} = wait(r{at})"
        for at in range(layers)
    )
    text += "\nreturn " + ", ".join(f"s{at}" for at in range(layers))
    for times in (1.0, 1.5):
        ctx = replace(ROOMY, overlap_margin=times)
        moved, _ = planned(text, ctx)
        starts = [node.name for node in moved.starts()]
        assert all(starts.index(f"g{at + 1}") < starts.index(f"r{at}") for at in range(layers - 1))
        # No compute can overlap the first gather and the last reduction.
        assert simulate(moved).exposed_ns <= 20e3 + 50e3


def test_gathers_into_a_pool_start_early_although_other_memory_peaks_later():
    """Other memory has 23B at last, and the pool 8B if each gather starts one layer ahead: together, they fit."""
    layers = 8
    text = "x = input : 1B\n"
    for at in range(layers):
        text += f"p{at} = input : 0B; g{at} = all_gather(p{at}) @dp(2) via copy : 4B 50us; w{at} = wait(g{at})\n"
        text += f"x{at} = kernel({f'x{at - 1}' if at else 'x'}, w{at}) : 2B 50us\n"
    text += f"last = kernel({', '.join(f'x{at}' for at in range(layers))}) : 6B\nreturn last"
    for budget, exposed_ns in ((31, 50e3), (30, 400e3)):  # nothing can hide the first gather
        moved, _ = planned(text, Context(reorder_collectives=True, budget_bytes=budget))
        assert simulate(moved).exposed_ns == exposed_ns


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.data())
def test_range_maxima_are_those_of_the_slice(values, data):
    low = data.draw(st.integers(0, len(values) - 1))
    high = data.draw(st.integers(low + 1, len(values)))
    assert RangeMax(values).most(low, high) == max(values[low:high])


@given(schedules(most_nodes=20), st.sampled_from([None, 0, 3]), st.booleans())
@settings(max_examples=300)
def test_random_schedules_keep_what_every_pass_keeps(schedule, room, pooled):
    schedule = by_copies(schedule) if pooled else schedule
    slow = DeviceProfile(
        "slow", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.5, launch_ns=2.0, synchronous=True
    )
    budget = None if room is None else peak(schedule) + room
    for ctx in (
        Context(reorder_collectives=True, budget_bytes=budget),
        Context(reorder_collectives=True, budget_bytes=budget, profile=slow, overlap_margin=1.5),
    ):
        moved, _ = plan_overlap(schedule, ctx)
        check_invariants(schedule, moved, ctx)
