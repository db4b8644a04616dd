from hypothesis import given, settings

from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.passes.base import Context
from overlapc.passes.raise_collectives import raise_collectives
from overlapc.schedule.text import parse
from tests.graphs import check_invariants, check_pass, schedules


def test_a_start_moves_to_the_beginning():
    check_pass(
        raise_collectives,
        before="h = kernel(x); v = view(p); ag0 = all_gather(v) @dp; w0 = wait(ag0); y = kernel(h, w0)",
        after="v = view(p); ag0 = all_gather(v) @dp; h = kernel(x); w0 = wait(ag0); y = kernel(h, w0)",
        reasons={"ag0": "data dependence on v"},
    )


def test_each_rule_has_its_reason():
    report = check_pass(
        raise_collectives,
        before="""
            h = kernel(x); a = all_gather(p) @dp; b = all_gather(q) @dp; rs = reduce_scatter(h) @tp
            k = kernel(x); s = all_gather(p) @ep after=k; c = comm:send(x) @pp; m = kernel(x); t = all_gather(q) @dp
            wa = wait(a); wb = wait(b); ws = wait(s); wr = wait(rs); wt = wait(t)
        """,
        after="""
            a = all_gather(p) @dp; b = all_gather(q) @dp; h = kernel(x); rs = reduce_scatter(h) @tp
            k = kernel(x); s = all_gather(p) @ep; c = comm:send(x) @pp; t = all_gather(q) @dp; m = kernel(x)
            wa = wait(a); wb = wait(b); ws = wait(s); wr = wait(rs); wt = wait(t)
        """,
    )
    assert report.reasons == {
        "a": "start of schedule",
        "b": "collective order: a is first",
        "rs": "data dependence on h",
        "s": "has to come after k",
        "t": "c is a barrier",
    }


def test_nothing_to_raise_leaves_the_schedule_itself():
    schedule = parse("ag0 = all_gather(p) @dp; w0 = wait(ag0); y = kernel(w0)")
    assert raise_collectives(schedule, Context())[0] is schedule


def test_collectives_that_become_ready_together_keep_their_order():
    check_pass(
        raise_collectives,
        before="h = kernel(x); k = kernel(h); a = all_gather(h) @dp; b = all_gather(h) @tp; u = wait(a); v = wait(b)",
        after="h = kernel(x); a = all_gather(h) @dp; b = all_gather(h) @tp; k = kernel(h); u = wait(a); v = wait(b)",
    )


def test_a_start_waits_for_all_that_it_needs():
    check_pass(
        raise_collectives,
        before="a = kernel(x); b = kernel(x); k = kernel(x); r, t = reduce_scatter(a, b) @dp; s = wait(r); u = wait(t)",
        after="a = kernel(x); b = kernel(x); r, t = reduce_scatter(a, b) @dp; k = kernel(x); s = wait(r); u = wait(t)",
        reasons={"r": "data dependence on b"},
    )


def test_views_that_no_collective_needs_stay():
    text = "a = all_gather(p) @dp; h = kernel(x); k = kernel(x); v = view(h); w = wait(a); y = kernel(v, k, w)"
    assert raise_collectives(parse(text), Context())[0] == parse(text)


def test_an_order_that_simulates_slower_is_undone():
    """Overlapped, the gather takes 20 ns, in which the kernel does 7 ns of its work: 113 ns in total instead of 110."""
    profile = DeviceProfile("slow", slowdowns={"other": Slowdown(3.0, 3.0)}, collective_slowdown=2.0)
    text = "h = kernel(x) : 1B 100ns; a = all_gather(p) @dp : 1B 10ns; w = wait(a); y = kernel(h, w) : 1B"
    check_pass(
        raise_collectives, text, text, {"a": "undone: the simulated step became longer"}, Context(profile=profile)
    )


def test_an_order_that_exceeds_memory_is_undone():
    text = "h = kernel() : 8B; k = kernel() : 1B; ag0 = all_gather(p) @dp : 4B; w0 = wait(ag0); y = kernel(w0)"
    check_pass(raise_collectives, text, text, {"ag0": "peak memory"}, Context(budget_bytes=11))


@given(schedules())
@settings(max_examples=200)
def test_random_schedules_keep_what_every_pass_keeps(schedule):
    for ctx in (Context(), Context(peak_increase=0.0)):
        moved, _ = raise_collectives(schedule, ctx)
        check_invariants(schedule, moved, ctx)
