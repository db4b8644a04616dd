import pytest
from hypothesis import given, settings

from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.passes.base import Context
from overlapc.passes.reasons import Reason
from overlapc.passes.sink_waits import sink_waits
from overlapc.schedule.text import parse
from tests.graphs import check_invariants, check_order, check_pass, schedules


def test_wait_moves_to_its_first_reader():
    check_pass(
        sink_waits,
        before="ag0 = all_gather(%p0) @dp; %w0 = wait(ag0); %h = kernel(%x); %y = kernel(%h, %w0)",
        after="ag0 = all_gather(%p0) @dp; %h = kernel(%x); %w0 = wait(ag0); %y = kernel(%h, %w0)",
        reasons={"%w0": "%y reads it"},
    )


def test_a_wait_already_in_place_leaves_the_schedule_itself():
    schedule = parse("ag0 = all_gather(%p0) @dp; %w0 = wait(ag0); %y = kernel(%w0)")
    assert sink_waits(schedule, Context())[0] is schedule


def test_views_of_the_result_sink_with_it():
    check_pass(
        sink_waits,
        before="ag0 = all_gather(p) @dp; w = wait(ag0); v = view(w); h = kernel(x); y = kernel(h, v)",
        after="ag0 = all_gather(p) @dp; h = kernel(x); w = wait(ag0); v = view(w); y = kernel(h, v)",
        reasons={"w": "y reads it"},
    )


def test_a_wait_that_only_the_caller_needs_sinks_to_the_end():
    check_pass(
        sink_waits,
        before="rs = reduce_scatter(g) @dp; w = wait(rs); h = kernel(x); return w",
        after="rs = reduce_scatter(g) @dp; h = kernel(x); w = wait(rs); return w",
        reasons={"w": "end of schedule"},
    )


def test_cheap_work_on_the_result_sinks_with_an_exposed_wait():
    """Scaling a scattered gradient does not stop its wait; work as long as a matrix product does."""
    text = "rs = reduce_scatter(g) @dp : 1B 100ns; w = wait(rs); {scale}; h = kernel(x) : 0B 90ns; return s"
    check_pass(
        sink_waits,
        before=text.format(scale="s = kernel(w) : 1B 5ns"),
        after="rs = reduce_scatter(g) @dp; h = kernel(x); w = wait(rs); s = kernel(w)",
        reasons={"w": "end of schedule"},
        ctx=Context(peak_increase=1.0),
    )
    costly = text.format(scale="s = kernel(w) : 1B 50ns")
    check_pass(sink_waits, before=costly, after=costly, reasons={"w": "s reads it"})


GRADIENTS = """
    g0 = kernel() : 8B 50ns; rs0 = reduce_scatter(g0) @dp : 2B 50ns; w0 = wait(rs0)
    g1 = kernel() : 8B 50ns; rs1 = reduce_scatter(g1) @dp : 2B 50ns; w1 = wait(rs1)
    return w0, w1
"""


def test_an_exposed_wait_takes_memory_up_to_the_limit():
    check_pass(
        sink_waits,
        before=GRADIENTS,
        after="g0 = kernel(); rs0 = reduce_scatter(g0) @dp; g1 = kernel(); w0 = wait(rs0)\n"
        "rs1 = reduce_scatter(g1) @dp; w1 = wait(rs1)",
        reasons={"w0": "peak memory", "w1": "end of schedule"},
        ctx=Context(budget_bytes=18),
    )


def test_memory_stops_a_wait():
    check_pass(sink_waits, GRADIENTS, GRADIENTS, {"w0": "peak memory"}, Context(budget_bytes=17))


def test_a_hidden_wait_stays_within_the_peak_of_the_given_schedule():
    text = """
        g0 = kernel() : 8B 50ns; rs0 = reduce_scatter(g0) @dp : 2B 50ns; {}
        k1 = kernel() : 1B 60ns; {}; k2 = kernel(k1) : 8B 60ns; {}; return w0
    """
    wait = "w0 = wait(rs0)"
    check_pass(
        sink_waits,
        text.format(wait, "", ""),
        text.format("", wait, ""),
        {"w0": "peak memory"},
        Context(peak_increase=5),
    )
    check_pass(  # with room below the peak of the given schedule
        sink_waits,
        "x = input : 1B; big = kernel() : 90B;" + text.format(wait, "", ""),
        "x = input : 1B; big = kernel() : 90B;" + text.format("", "", wait),
        {"w0": "end of schedule"},
    )


def test_an_overwriting_of_what_is_in_flight_stops_a_wait():
    text = "rs = reduce_scatter(g) @dp; {} h = kernel(x); {} m = kernel(g) mutates=g : =g; return w"
    wait = "w = wait(rs);"
    check_pass(sink_waits, text.format(wait, ""), text.format("", wait), {"w": "has to come before m"})


def test_unknown_communication_stops_a_wait():
    text = "a = all_gather(p) @dp; {} h = kernel(x); {} c = comm:send(x) @pp; return w"
    wait = "w = wait(a);"
    check_pass(sink_waits, text.format(wait, ""), text.format("", wait), {"w": "c is a barrier"})


def test_a_move_that_simulates_slower_is_undone():
    """Overlapped, the gather takes 20 ns, in which the kernel does 7 ns of its work: 113 ns in total instead of 110."""
    profile = DeviceProfile("slow", slowdowns={"other": Slowdown(3.0, 3.0)}, collective_slowdown=2.0)
    text = "a = all_gather(p) @dp : 1B 10ns; w = wait(a); h = kernel(x) : 1B 100ns; y = kernel(h, w) : 1B"
    check_pass(sink_waits, text, text, {"w": "undone: the simulated step became longer"}, Context(profile=profile))


def test_all_waits_of_a_bucket_go_where_its_memory_is_needed():
    """One wait alone would free nothing, because the bucket keeps its inputs alive until its last wait."""
    check_pass(
        sink_waits,
        before="""
            g = kernel(x) : 8B 5us; h = kernel(x) : 8B 5us; r, t = reduce_scatter(g, h) @dp : 1B, 1B 10us
            s = wait(r); u = wait(t); v = all_gather(p) @dp : 0B 500us; z = wait(v)
            a = kernel(x) : 4B 50us; b = kernel(a) : 8B 5us; c = kernel(a, b) : 1B 5us; return s, u
        """,
        after="""
            g = kernel(x); h = kernel(x); r, t = reduce_scatter(g, h) @dp; v = all_gather(p) @dp; a = kernel(x)
            s = wait(r); u = wait(t); b = kernel(a); c = kernel(a, b); z = wait(v)
        """,
        reasons={"s": "peak memory", "u": "peak memory"},
    )


# Rule -> (schedule, resulting order, allowed increase of the peak). Without the rule the order would differ.
ORDERS = {
    "kernels that sank with a wait are placed when memory runs out": (
        "g = reduce_scatter(p) @dp : 1B 200ns; w = wait(g); s = kernel(w) : 1B 20ns; k = kernel(x) : 1B 50ns",
        "g w s k",
        0.0,
    ),
    "a wait that would free nothing is not placed for memory": (
        """
        g = reduce_scatter(p) @dp : 1B 50ns; w = wait(g); s = kernel(w) : 4B 5ns; k = kernel(x) : 8B 50ns
        h = reduce_scatter(k) @dp : 1B 50ns; u = wait(h)
        """,
        "g k h w s u",
        5.0,
    ),
    "work that sinks is counted together: each alone is a fifth of its collective": (
        """
        g = reduce_scatter(p) @dp : 4B 100ns; w = wait(g); a = kernel(w) : 8B 20ns; b = kernel(a) : 8B 20ns
        k = kernel(x) : 8B 90ns; c = kernel(b) : 1B 20ns
        """,
        "g w a b k c",
        5.0,
    ),
    "work sinks only while memory has room for its result": (
        """
        g = reduce_scatter(x) @dp : 4B 100ns; w = wait(g); h = reduce_scatter(p) @dp : 1B 100ns; u = wait(h)
        s = kernel(u) : 4B 20ns
        """,
        "g h u w s",
        0.0,
    ),
    "work on a hidden result does not sink": (
        """
        g = reduce_scatter(x) @dp : 1B 50ns; w = wait(g); a = kernel(x) : 4B 50ns; s = kernel(w) : 0B 5ns
        b = kernel(a) : 1B 50ns; return s
        """,
        "g a w s b",
        5.0,
    ),
    "work that takes just a quarter of its collective's time sinks": (
        """
        g = reduce_scatter(x) @dp : 0B 20us; w = wait(g); s = kernel(w) : 0B 5us; k = kernel(x) : 0B 50us
        """,
        "g k w s",
        5.0,
    ),
    "a collective of unknown length is never known to be hidden": (
        "g = reduce_scatter(x) @dp : 1B; w = wait(g); k = kernel(x) : 8B 50us",
        "g k w",
        5.0,
    ),
    "a collective does not sink with a wait": (
        """
        g, gb = reduce_scatter(x) @dp : 0B, 0B 50us; b = wait(gb); w = wait(g); h = reduce_scatter(b) @dp : 0B 50us
        """,
        "g b h w",
        5.0,
    ),
    "a held node takes its memory only once when it is placed": (
        """
        g = reduce_scatter(x) @dp : 0B 100us; w = wait(g); a = kernel(w) : 0B 20us; b = kernel(a) : 8B 5us; c = view(a)
        k = kernel(b) : 0B 50us
        """,
        "g w a b k c",
        0.0,
    ),
    "no more waits are placed than memory requires": (
        """
        g = reduce_scatter(x) @dp : 0B 50us; h = reduce_scatter(x) @dp : 8B 50us; w = wait(h)
        i = reduce_scatter(x) @dp : 1B 50us; u = wait(i); v = wait(g); k = kernel(x) : 0B 50us; l = kernel(k) : 8B 50us
        """,
        "g h w i k u l v",
        0.0,
    ),
    "waits are placed until memory has room": (
        """
        g = reduce_scatter(x) @dp : 1B 50us; w = wait(g); s = kernel(w) : 0B 5us; k = kernel(x) : 0B 50us
        l = kernel(x) : 4B 50us
        """,
        "g k w s l",
        0.0,
    ),
    "waits that are not hidden are placed one by one, where nothing else helps": (
        """
        g = reduce_scatter(x) @dp : 0B 50us; w = wait(g); h = reduce_scatter(x) @dp : 1B; v = view(w); u = wait(h)
        k = kernel(x) : 8B 50us
        """,
        "g h u k w v",
        0.0,
    ),
    "the memory that counts is that of the node to be placed": (
        """
        a = all_gather(x) @dp : 1B 50us; b = wait(a); c = kernel(x) : 1B 20us; d = kernel(b) : 8B 5us; e = view(x)
        f = all_gather(b) @tp : 8B 100us; g = view(b); h = kernel(g) : 0B 5us; i = wait(f); return c
        """,
        "a c e b d f g h i",
        0.25,
    ),
}


@pytest.mark.parametrize("rule", ORDERS)
def test_every_rule_makes_a_difference(rule):
    before, after, peak_increase = ORDERS[rule]
    check_order(sink_waits, before, after, Context(peak_increase=peak_increase))


def test_memory_is_the_reason_where_work_that_sank_has_to_run():
    check_pass(
        sink_waits,
        before="""
            g = all_reduce(p) @dp : 1B 20us; w = wait(g); s = kernel(w, p) : 4B 5us; k = kernel(p) : 1B 100us
            l = kernel(x) : 4B 20us; m = kernel(s) : 0B 100us; return l, s
        """,
        after="g = all_reduce(p) @dp; k = kernel(p); w = wait(g); s = kernel(w, p); l = kernel(x); m = kernel(s)",
        reasons={"w": "peak memory"},
        ctx=Context(peak_increase=0.0),
    )


@given(schedules())
@settings(max_examples=200)
def test_random_schedules_keep_what_every_pass_keeps(schedule):
    for ctx in (Context(), Context(peak_increase=0.0), Context(profile=DeviceProfile("d", launch_ns=3.0))):
        moved, report = sink_waits(schedule, ctx)
        check_invariants(schedule, moved, ctx)
        assert set(report.limits.values()) <= set(Reason)
