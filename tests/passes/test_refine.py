from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.config import Config
from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.estimators.simulator.native import library_in
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context
from overlapc.passes.judge import cost
from overlapc.passes.refine import Search, refine
from overlapc.passes.run import run_pipeline
from overlapc.schedule.text import parse
from tests.graphs import check_invariants, check_pass, order_of, schedules

FREE = Context(reorder_collectives=True)


def test_compute_after_a_wait_moves_before_it():
    check_pass(
        refine,
        before="""
            a = kernel(x) : 0B 9us; rs = reduce_scatter(a) @dp : 0B 9us; s = wait(rs); y = kernel(s) : 0B 9us
            b = kernel(x) : 0B 9us
        """,
        after="""
            a = kernel(x) : 0B 9us; rs = reduce_scatter(a) @dp : 0B 9us; b = kernel(x) : 0B 9us
            s = wait(rs); y = kernel(s) : 0B 9us
        """,
    )


def test_compute_before_a_start_moves_after_it():
    schedule = parse("""
        a = kernel(x) : 0B 9us; b = kernel(x) : 0B 9us; rs = reduce_scatter(a) @dp : 0B 9us; s = wait(rs)
        y = kernel(s, b) : 0B 9us
    """)
    moved, report = refine(schedule, Context())
    assert order_of(moved) == ["a", "rs", "b", "s", "y"]
    assert report.reasons["rs"] == "data dependence on a"


def test_at_last_a_wait_moves_to_its_reader_though_its_collective_is_hidden_already():
    schedule = parse("""
        ag = all_gather(p) @dp : 0B 9us; a = kernel(x) : 0B 9us; rs = reduce_scatter(a) @tp : 0B 5us; s = wait(rs)
        w = wait(ag); y = kernel(s) : 0B 9us; b = kernel(x) : 0B 9us; z = kernel(y, b, w) : 0B 9us
    """)
    moved, _ = refine(schedule, Context())
    assert order_of(moved)[-2:] == ["w", "z"]
    assert refine(schedule, Context(most_moves=0))[0] is schedule


GATHER = """
    k = kernel(x) : 0B 9us; c = kernel(p) : 0B {}; ag = all_gather(c) @dp : 0B 9us; w = wait(ag)
    y = kernel(k, w) : 0B 9us
"""


def test_nodes_that_a_start_needs_move_with_it():
    moved, report = refine(parse(GATHER.format("1us")), Context())
    assert order_of(moved) == ["c", "ag", "k", "w", "y"]
    assert report.reasons["ag"] == "data dependence on c"


def test_nothing_of_unknown_length_moves():
    unknown = parse("k = kernel(x) : 0B 9us; ag = all_gather(p) @dp : 0B; w = wait(ag); y = kernel(k, w) : 0B 9us")
    assert refine(unknown, Context())[0] is unknown


# The scatter is not urgent; the gather after it on the queue is.
QUEUE = """
    k = kernel(x) : 0B 9us; rs = reduce_scatter(g) @dp : 0B 9us; ag = all_gather(p) @dp : 0B 9us; w = wait(ag)
    y = kernel(k, w) : 0B 9us; z = kernel(y) : 0B 9us; s = wait(rs)
"""


def test_a_start_passes_another_of_its_group_only_where_that_is_allowed():
    schedule = parse(QUEUE)
    kept, free = refine(schedule, Context())[0], refine(schedule, FREE)[0]
    assert [each for each in order_of(kept) if each in ("rs", "ag")] == ["rs", "ag"]
    assert [each for each in order_of(free) if each in ("rs", "ag")] == ["ag", "rs"]
    assert FREE.timeline(free).step_ns < FREE.timeline(kept).step_ns


def test_compute_moves_only_within_the_memory_limit():
    """Overlapping the scatter, the 8 bytes of `b` are alive in addition to those of `a`; `c` needs no memory."""
    schedule = parse("""
        a = kernel(x) : 8B 9us; rs = reduce_scatter(a) @dp : 0B 9us; s = wait(rs); y = kernel(s) : 0B 9us
        b = kernel(x) : 8B 9us; z = kernel(b) : 0B 9us; c = kernel(x) : 0B 5us
    """)
    tight, roomy = (order_of(refine(schedule, Context(budget_bytes=most))[0]) for most in (8, 16))
    assert tight.index("c") < tight.index("s") < tight.index("b")
    assert roomy.index("b") < roomy.index("s")


def test_a_schedule_that_cannot_gain_is_unchanged():
    schedule = parse("ag = all_gather(p) @dp : 0B 9us; k = kernel(x) : 0B 9us; w = wait(ag); y = kernel(w) : 0B 9us")
    moved, report = refine(schedule, Context())
    assert moved is schedule
    assert report.moves == report.reasons == {}


def test_late_collectives_count():
    """As estimated, the collective is hidden; in case it takes 1.5 times as long, `b` should overlap it, too."""
    schedule = parse("""
        a = kernel(x) : 0B 9us; rs = reduce_scatter(a) @dp : 0B 9us; c = kernel(x) : 0B 9us; s = wait(rs)
        y = kernel(s) : 0B 9us; b = kernel(x) : 0B 9us
    """)
    ctx = Context(overlap_margin=1.5)
    moved, _ = refine(schedule, ctx)
    order = order_of(moved)
    assert order.index("rs") < order.index("b") < order.index("s")


def test_help_for_late_collectives_does_not_make_the_step_longer():
    """Overlapping the collective, `b` takes three times as long (18us more), which pays only if it is late."""
    schedule = parse("""
        a = kernel(x) : 0B 9us; rs = reduce_scatter(a) @dp : 0B 90us; c = kernel(x) : 0B 90us; s = wait(rs)
        y = kernel(s) : 0B 9us; b = kernel(x) : 0B 9us
    """)
    slow = DeviceProfile("slow", slowdowns={"other": Slowdown(3.0, 3.0)})
    ctx = Context(profile=slow, overlap_margin=5.0)
    moved, _ = refine(schedule, ctx)
    assert ctx.timeline(moved).step_ns <= ctx.timeline(schedule).step_ns


def test_a_schedule_without_collectives_is_unchanged():
    for text in ("a = kernel(x) : 1B 9us; b = kernel(x) : 1B 9us", "p = input : 1B; return p"):
        schedule = parse(text)
        moved, report = refine(schedule, Context())
        assert moved is schedule
        assert report.moves == report.reasons == {}


# The first gather leaves the device idle most of the time, so at the higher clock `m` takes half its time at full load.
MOSTLY_IDLE = """
    ag = all_gather(p) @tp : 0B 900us; v = wait(ag); g = kernel(v) : 0B 9us; rs = reduce_scatter(g) @dp : 0B 90us
    m = extern:mm(v) flops=100 in=bfloat16 : 0B 100us; s = wait(rs); y = kernel(s) : 0B 9us; k = kernel(v) : 0B 60us
"""


@pytest.mark.parametrize(("heat", "covers"), [((), 1), (((700, 0.5), (1000, 1.0)), 2)], ids=["full-load", "idle"])
def test_compute_is_timed_at_the_clock_of_the_whole_step(heat, covers):
    schedule, profile = (
        parse(MOSTLY_IDLE),
        DeviceProfile("gpu", throttle={"matmul": ((1, 2.0),)}, clock_by_utilization=heat),
    )
    result = run_pipeline(schedule, Context(profile=profile))
    order = order_of(result.schedule)
    assert len({"m", "k"}.intersection(order[order.index("rs") + 1 : order.index("s")])) >= covers
    assert result.after.exposed_ns == 900e3
    assert result.schedule.node("m").estimate.ns == (50e3 if heat else 100e3)


LAYERS = "h0 = kernel(x) : 0B 9us\n" + "\n".join(
    f"a{at} = all_gather(p{at}) @dp : 0B 20us; w{at} = wait(a{at}); h{at + 1} = kernel(h{at}, w{at}) : 0B 30us"
    for at in range(40)
)


def test_a_move_that_helps_one_layer_is_tried_on_all_layers():
    """Each gather moves before the previous layer, in far fewer replays than nodes times distances."""
    schedule = parse(LAYERS)
    moved, _ = refine(schedule, Context(effort=600))
    assert simulate(moved).exposed_ns <= 0.1 * simulate(schedule).exposed_ns


@given(schedules())
@settings(max_examples=60)
def test_random_schedules_keep_what_every_pass_keeps(schedule):
    slow = DeviceProfile("slow", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.5, launch_ns=2.0)
    for ctx in (Context(check_memory=True), FREE, Context(profile=slow, overlap_margin=1.5, reorder_collectives=True)):
        moved, _ = refine(schedule, ctx)
        check_invariants(schedule, moved, ctx)
        assert cost(moved, ctx) <= cost(schedule, ctx)


@given(schedules())
@settings(max_examples=40)
def test_more_effort_and_more_moves_are_never_worse(schedule):
    ctx = replace(FREE, overlap_margin=1.5)
    for knob, values in (("effort", (0, 20, 100, 10_000)), ("most_moves", (0, 1, 5, None))):
        costs = [cost(refine(schedule, replace(ctx, **{knob: value}))[0], ctx) for value in values]
        assert costs == sorted(costs, reverse=True)
        assert costs[0] == cost(schedule, ctx)


@given(schedules())
@settings(max_examples=20)
def test_a_search_that_goes_on_finds_what_one_without_a_pause_finds(schedule):
    whole, paused = (Search(schedule, FREE) for _ in range(2))
    whole.run(500)
    for effort in (0, 1, 7, 100, 500):
        paused.run(effort)
    assert whole.best == paused.best
    assert whole.replays == paused.replays
    refine(schedule, replace(FREE, effort=500))
    less, _ = refine(schedule, replace(FREE, effort=7))
    assert order_of(less) == order_of(refine(replace(schedule), replace(FREE, effort=7))[0])


@given(schedules(), st.sampled_from([1.0, 1.5]), st.booleans(), st.booleans())
@settings(max_examples=60)
def test_the_search_in_c_makes_the_moves_of_the_one_in_python(schedule, margin, reorder, tight):
    slow = DeviceProfile("slow", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.5, launch_ns=2.0)
    final = Context().limit_bytes(schedule) if tight else None
    ctx = Context(
        profile=slow, overlap_margin=margin, reorder_collectives=reorder, peak_increase=2.0, final_bytes=final
    )
    python, in_c = Search(schedule, ctx), Search(schedule, replace(ctx, cache_dir=Config().cache_dir))
    assert library_in(Config().cache_dir) is not None
    for effort in (3, 100, 2_000):
        for most_moves in (5, None):
            for search in (python, in_c):
                search.most_moves = most_moves
                search.run(effort)
            assert (in_c.made, in_c.proposals, in_c.replays) == (python.made, python.proposals, python.replays)
            assert in_c.now == python.now
            assert in_c.best == python.best


@given(schedules())
@settings(max_examples=20)
def test_the_same_schedule_is_always_refined_the_same_way(schedule):
    one, other = (refine(replace(schedule), FREE)[0] for _ in range(2))
    assert order_of(one) == order_of(other)
