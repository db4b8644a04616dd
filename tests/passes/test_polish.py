from dataclasses import replace

import pytest
from hypothesis import given, settings

from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.passes import polish as module
from overlapc.passes.base import Context
from overlapc.passes.judge import cost
from overlapc.passes.polish import polish
from overlapc.passes.run import run_pipeline
from overlapc.schedule.text import parse
from tests.graphs import check_kept, check_pass, order_of, schedules
from tests.passes.contexts import SLOW

FREE = Context(reorder_collectives=True)


def test_compute_from_behind_a_wait_goes_before_it():
    check_pass(
        polish,
        before="""
            a = kernel(x) : 0B 9us; rs = reduce_scatter(a) @dp : 0B 9us; s = wait(rs); y = kernel(s) : 0B 9us
            b = kernel(x) : 0B 9us
        """,
        after="""
            a = kernel(x) : 0B 9us; rs = reduce_scatter(a) @dp : 0B 9us; b = kernel(x) : 0B 9us
            s = wait(rs); y = kernel(s) : 0B 9us
        """,
        reasons={"b": "so that rs is less exposed"},
    )


def test_compute_from_before_a_start_goes_behind_it():
    check_pass(
        polish,
        before="""
            a = kernel(x) : 0B 9us; b = kernel(x) : 0B 9us; rs = reduce_scatter(a) @dp : 0B 9us; s = wait(rs)
            y = kernel(s, b) : 0B 9us
        """,
        after="""
            a = kernel(x) : 0B 9us; rs = reduce_scatter(a) @dp : 0B 9us; b = kernel(x) : 0B 9us; s = wait(rs)
            y = kernel(s, b) : 0B 9us
        """,
        reasons={"b": "so that rs is less exposed"},
    )


def test_a_wait_goes_later_with_its_views(monkeypatch):
    monkeypatch.setattr(module, "NEAR", 0)  # no compute moves by itself
    check_pass(
        polish,
        before="""
            rs = reduce_scatter(g) @dp : 0B 9us; s = wait(rs); v = view(s); k = kernel(x) : 0B 9us
            y = kernel(v, k) : 0B 9us
        """,
        after="""
            rs = reduce_scatter(g) @dp : 0B 9us; k = kernel(x) : 0B 9us; s = wait(rs); v = view(s)
            y = kernel(v, k) : 0B 9us
        """,
        reasons={"s": "where less of it is exposed"},  # `s` waits for `rs`: that it moved for `rs` says nothing
    )


GATHER = """
    k = kernel(x) : 0B 9us; c = kernel(p) : 0B 1us; ag = all_gather(c) @dp : 0B 9us; w = wait(ag)
    y = kernel(k, w) : 0B 9us
"""


def test_what_a_start_needs_and_is_cheap_moves_with_it(monkeypatch):
    monkeypatch.setattr(module, "NEAR", 0)  # no compute moves by itself
    moved, _ = polish(parse(GATHER), Context())
    assert order_of(moved) == ["c", "ag", "k", "w", "y"]
    for dear in ("3us", ""):  # no more than a quarter of the collective, and nothing of unknown length
        schedule = parse(GATHER.replace("1us", dear))
        assert polish(schedule, Context())[0] is schedule


# The scatter has time; the gather behind it on the queue does not.
QUEUE = """
    k = kernel(x) : 0B 9us; rs = reduce_scatter(g) @dp : 0B 9us; ag = all_gather(p) @dp : 0B 9us; w = wait(ag)
    y = kernel(k, w) : 0B 9us; z = kernel(y) : 0B 9us; s = wait(rs)
"""


def test_a_start_passes_another_of_its_group_only_where_that_is_allowed():
    schedule = parse(QUEUE)
    kept, free = polish(schedule, Context())[0], polish(schedule, FREE)[0]
    assert [each for each in order_of(kept) if each in ("rs", "ag")] == ["rs", "ag"]
    assert [each for each in order_of(free) if each in ("rs", "ag")] == ["ag", "rs"]
    assert FREE.timeline(free).step_ns < FREE.timeline(kept).step_ns


def test_what_holds_up_the_queue_is_moved_too(monkeypatch):
    """Nothing that `q` itself could do helps: it waits for `r`, whose start stands behind `b`."""
    text = """
        a = kernel(x) : 0B 9us; b = kernel(x) : 0B 20us; r = reduce_scatter(a) @dp : 0B 40us
        c = kernel(b) : 0B 9us; q = reduce_scatter(c) @dp : 0B 9us; s = wait(r); t = wait(q); y = kernel(t, s) : 0B 9us
    """
    moved, _ = polish(parse(text), Context())
    assert order_of(moved)[:3] == ["a", "r", "b"]
    monkeypatch.setattr(module, "BEFORE", 0)
    only_q = parse(text.replace("s = wait(r); t = wait(q); y = kernel(t, s)", "t = wait(q); y = kernel(t)"))
    assert polish(only_q, Context())[0] is only_q


def test_memory_is_a_limit(monkeypatch):
    """Under the scatter `b` keeps its 8 bytes beside those of `a`; `c` takes none."""
    schedule = parse("""
        a = kernel(x) : 8B 9us; rs = reduce_scatter(a) @dp : 0B 9us; s = wait(rs); y = kernel(s) : 0B 9us
        b = kernel(x) : 8B 9us; z = kernel(b) : 0B 9us; c = kernel(x) : 0B 5us
    """)
    assert order_of(polish(schedule, Context(budget_bytes=8))[0])[2:4] == ["c", "s"]
    assert order_of(polish(schedule, Context(budget_bytes=16))[0])[2] == "b"
    monkeypatch.setattr(module, "TRIES", 1)  # which is `b`
    assert polish(schedule, Context(budget_bytes=8))[0] is schedule


def test_late_collectives_count_too():
    """As estimated the collective is hidden; if it takes half as long again, `b` should be beside it as well."""
    schedule = parse("""
        a = kernel(x) : 0B 9us; rs = reduce_scatter(a) @dp : 0B 9us; c = kernel(x) : 0B 9us; s = wait(rs)
        y = kernel(s) : 0B 9us; b = kernel(x) : 0B 9us
    """)
    assert polish(schedule, Context())[0] is schedule
    moved, _ = polish(schedule, Context(overlap_margin=1.5))
    assert order_of(moved).index("b") < order_of(moved).index("s")


def test_what_helps_late_collectives_only_may_not_make_the_step_longer():
    """Beside the collective `b` takes three times as long: 18us more, of 60us less should it be late."""
    schedule = parse("""
        a = kernel(x) : 0B 9us; rs = reduce_scatter(a) @dp : 0B 90us; c = kernel(x) : 0B 90us; s = wait(rs)
        y = kernel(s) : 0B 9us; b = kernel(x) : 0B 9us
    """)
    slow = DeviceProfile("slow", slowdowns={"other": Slowdown(3.0, 3.0)})
    ctx = Context(profile=slow, overlap_margin=5.0)
    moved, _ = polish(schedule, ctx)
    assert ctx.timeline(moved).step_ns <= ctx.timeline(schedule).step_ns


def test_hiding_more_may_not_cost_late_collectives_more_than_they_gained(monkeypatch):
    """With `f` before `c` less is exposed in a step within a tenth, but if both are late it is longer than it came."""
    monkeypatch.setattr(module, "TIE", 0.1)
    schedule = parse("""
        a = reduce_scatter(x) @dp : 0B 100us; b = kernel(x) : 0B 100us; c = kernel(x) : 0B 100us; d = wait(a)
        e = kernel(x) : 0B 5us; f = reduce_scatter(e) @dp : 0B 5us; w = wait(f)
    """)
    moved, _ = polish(schedule, SLOW)
    assert order_of(moved) == ["a", "b", "c", "d", "e", "f", "w"]
    assert cost(moved, SLOW) <= cost(schedule, SLOW)


def test_nothing_exposed_is_nothing_to_do():
    schedule = parse("ag = all_gather(p) @dp : 0B 9us; k = kernel(x) : 0B 9us; w = wait(ag); y = kernel(w) : 0B 9us")
    moved, report = polish(schedule, Context())
    assert moved is schedule
    assert report.moves == report.reasons == {}
    nothing = parse("p = input : 1B; return p")
    assert polish(nothing, Context())[0] is nothing


TWO = """
    a = kernel(x) : 0B 9us; r = reduce_scatter(a) @dp : 0B 9us; s = wait(r); b = kernel(s) : 0B 9us
    q = reduce_scatter(b) @dp : 0B 9us; t = wait(q); y = kernel(t) : 0B 9us
    c = kernel(x) : 0B 9us; d = kernel(x) : 0B 9us
"""


@pytest.mark.parametrize("moves", [0, 1, 2])
def test_so_many_moves_and_no_more(moves):
    _, report = polish(parse(TWO), Context(most_moves=moves))
    assert len(report.moves) == moves
    result = run_pipeline(parse(TWO), Context(passes=("polish",), stop_after=f"polish:{moves}"))
    assert len(result.reports[0].moves) == moves


def test_so_many_tries_of_a_kind_and_no_more(monkeypatch):
    schedule = parse(f"""{TWO}
        o = reduce_scatter(y) @dp : 0B 9us; u = wait(o); z = kernel(u) : 0B 9us; e = kernel(x) : 0B 9us
    """)
    assert len(polish(schedule, Context())[1].moves) == 3
    monkeypatch.setattr(module, "TRIES", 0)
    assert polish(schedule, Context())[0] is schedule
    monkeypatch.setattr(module, "TRIES", 1)
    assert len(polish(schedule, Context())[1].moves) == 2  # one to make the step short, one to hide more
    monkeypatch.setattr(module, "TRIES", 1000)
    monkeypatch.setattr(module, "TRIES_TIMES_NODES", len(schedule.nodes) - 1)
    assert polish(schedule, Context())[0] is schedule


@given(schedules())
@settings(max_examples=150, deadline=None)
def test_random_schedules_keep_what_every_pass_keeps(schedule):
    slow = DeviceProfile("slow", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.5, launch_ns=2.0)
    for ctx in (Context(check_memory=True), FREE, Context(profile=slow, overlap_margin=1.5, reorder_collectives=True)):
        moved, _ = polish(schedule, ctx)
        check_kept(schedule, moved, ctx)
        assert cost(moved, ctx) <= cost(schedule, ctx)
        again, _ = polish(moved, replace(ctx, budget_bytes=ctx.limit_bytes(schedule)))
        assert cost(again, ctx) <= cost(moved, ctx)
