from hypothesis import given, settings

from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context
from overlapc.passes.fill_collectives import fill_collectives
from overlapc.schedule.text import parse
from tests.graphs import check_invariants, check_pass, order_of, schedules


def test_ready_compute_fills_a_collectives_time():
    check_pass(
        fill_collectives,
        before="""
            a = kernel(x) : 0B 50us; rs = reduce_scatter(a) @dp : 0B 40us; s = wait(rs); y = kernel(s) : 0B 9us
            b = kernel(x) : 0B 50us
        """,
        after="""
            a = kernel(x) : 0B 50us; rs = reduce_scatter(a) @dp : 0B 40us; b = kernel(x) : 0B 50us
            s = wait(rs); y = kernel(s) : 0B 9us
        """,
        reasons={"s": "all ready compute overlaps it already"},
    )


def test_compute_that_a_collective_needs_goes_first():
    """`g`, a weight gradient, feeds the reduction; `b` feeds no collective. So `g` goes first."""
    schedule = parse("""
        b = kernel(x) : 0B 50us; c = kernel(b) : 0B 50us
        g = kernel(x) : 0B 50us; rs = reduce_scatter(g) @dp : 0B 90us; s = wait(rs)
    """)
    moved, _ = fill_collectives(schedule, Context())
    assert order_of(moved) == ["g", "rs", "b", "c", "s"]
    assert simulate(moved).exposed_ns == 0


def test_compute_is_ordered_by_the_order_of_its_collectives():
    schedule = parse("""
        a = kernel(x) : 0B 10us; b = kernel(x) : 0B 10us; r1 = reduce_scatter(b) @dp : 0B 30us
        r2 = reduce_scatter(a) @dp : 0B 30us; c = kernel(x) : 0B 50us; s = wait(r1); t = wait(r2)
    """)
    assert order_of(fill_collectives(schedule, Context())[0])[:4] == ["b", "r1", "a", "r2"]


def test_a_wait_comes_as_soon_as_its_collective_is_done():
    """No node needs `s` yet, but the wait frees memory, and the node that reads `s` becomes ready."""
    schedule = parse("""
        a = kernel(x) : 0B 10us; rs = reduce_scatter(a) @dp : 0B 20us; s = wait(rs); y = kernel(s) : 0B 5us
        b = kernel(x) : 0B 30us; c = kernel(x) : 0B 30us
    """)
    assert order_of(fill_collectives(schedule, Context())[0]) == ["a", "rs", "b", "s", "y", "c"]


def test_a_schedule_without_idle_time_is_returned_unchanged():
    schedule = parse(
        "a = kernel(x) : 0B 50us; rs = reduce_scatter(a) @dp : 0B 40us; b = kernel(x) : 0B 50us; s = wait(rs)"
    )
    moved, report = fill_collectives(schedule, Context())
    assert moved is schedule
    assert report.reasons == report.moves == {}


def test_an_order_that_simulates_slower_is_undone():
    """The scatter would go first, and the kernel that overlaps it would take three times as long."""
    profile = DeviceProfile("slow", slowdowns={"other": Slowdown(3.0, 3.0)}, collective_slowdown=2.0)
    text = "rs = reduce_scatter(g) @dp : 0B 10us; s = wait(rs); y = kernel(s) : 0B 9us; b = kernel(x) : 0B 100us"
    check_pass(
        fill_collectives, text, text, {"s": "undone: the simulated step became longer"}, Context(profile=profile)
    )


def test_an_order_that_exceeds_memory_is_undone():
    text = """
        a = kernel(x) : 4B 50us; rs = reduce_scatter(a) @dp : 2B 40us; s = wait(rs); y = kernel(s, a) : 1B 9us
        b = kernel(x) : 8B 50us
    """
    schedule = parse(text)
    moved, report = fill_collectives(schedule, Context(budget_bytes=9))
    assert moved is schedule
    assert report.reasons["s"] == "peak memory"
    assert order_of(fill_collectives(schedule, Context(budget_bytes=20))[0])[2] == "b"


HELD = DeviceProfile("held", collectives_wait_for_kernels=True)


def test_the_shortest_kernel_comes_first_where_collectives_wait_for_kernels():
    """After `b` the collective would begin 50us later, after `c` only 5us."""
    check_pass(
        fill_collectives,
        before="""
            a = kernel(x) : 0B 9us; r = reduce_scatter(a) @tp : 0B 50us; s = wait(r); y = kernel(s) : 0B 9us
            b = kernel(x) : 0B 50us; c = kernel(x) : 0B 5us
        """,
        after="""
            a = kernel(x) : 0B 9us; r = reduce_scatter(a) @tp : 0B 50us; c = kernel(x) : 0B 5us; b = kernel(x) : 0B 50us
            s = wait(r); y = kernel(s) : 0B 9us
        """,
        reasons={"s": "all ready compute overlaps it already"},
        ctx=Context(profile=HELD),
    )


def test_saved_kernels_run_when_memory_runs_out():
    """`c` frees 8 bytes, without which `r` does not fit, so `c` cannot be saved for the wait; `d` can."""
    schedule = parse("""
        g = input freeable : 8B; a = kernel(x) : 0B 9us; c = kernel(g) : 0B 20us; d = kernel(x) : 0B 20us
        b = kernel(a) : 8B 9us; r = reduce_scatter(b) @tp : 8B 50us; s = wait(r); y = kernel(s) : 0B 9us
    """)
    assert order_of(fill_collectives(schedule, Context(budget_bytes=100))[0]) == ["a", "b", "r", "c", "d", "s", "y"]
    assert order_of(fill_collectives(schedule, Context(budget_bytes=16))[0]) == ["a", "b", "c", "r", "d", "s", "y"]


@given(schedules())
@settings(max_examples=200)
def test_random_schedules_keep_what_every_pass_keeps(schedule):
    slow = DeviceProfile("slow", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.5, launch_ns=2.0)
    for ctx in (Context(), Context(profile=slow, overlap_margin=1.5)):
        moved, _ = fill_collectives(schedule, ctx)
        check_invariants(schedule, moved, ctx)
