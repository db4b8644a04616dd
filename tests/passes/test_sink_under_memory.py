import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context
from overlapc.passes.queues import Queues
from overlapc.passes.reasons import Reason
from overlapc.passes.sink_under_memory import sink_under_memory
from overlapc.schedule.text import parse
from tests.graphs import check_invariants, check_pass, order_of, peak, schedules


def test_a_wait_moves_down_until_its_collective_is_hidden():
    check_pass(
        sink_under_memory,
        before="""
            rs = reduce_scatter(g) @dp : 0B 80us; w = wait(rs); a = kernel(x) : 0B 100us; b = kernel(a) : 0B 100us
            y = kernel(b, w) : 0B 1us
        """,
        after="rs = reduce_scatter(g) @dp; a = kernel(x); w = wait(rs); b = kernel(a); y = kernel(b, w)",
        reasons={"w": "hidden"},
    )


def test_a_wait_that_is_hidden_stays():
    schedule = parse("""
        rs = reduce_scatter(g) @dp : 0B 80us; a = kernel(x) : 0B 100us; w = wait(rs); b = kernel(a) : 0B 100us
        y = kernel(b, w)
    """)
    moved, report = sink_under_memory(schedule, Context())
    assert moved is schedule
    assert report.reasons == {"w": "hidden"}


def test_a_reader_stops_a_wait():
    check_pass(
        sink_under_memory,
        before="rs = reduce_scatter(g) @dp : 0B 80us; w = wait(rs); a = kernel(x) : 0B 9us; y = kernel(w) : 0B 50us",
        after="rs = reduce_scatter(g) @dp; a = kernel(x); w = wait(rs); y = kernel(w)",
        reasons={"w": "y reads it"},
    )


def test_the_end_of_the_schedule_stops_a_wait():
    check_pass(
        sink_under_memory,
        before="rs = reduce_scatter(g) @dp : 0B 80us; w = wait(rs); a = kernel(x) : 0B 9us; return w",
        after="rs = reduce_scatter(g) @dp; a = kernel(x); w = wait(rs); return w",
        reasons={"w": "end of schedule"},
    )


def test_memory_stops_a_wait():
    """A reduction in flight keeps its input alive: 8 B in addition to those of `b`."""
    text = """
        g = kernel() : 8B; rs = reduce_scatter(g) @dp : 2B 90us; {} a = kernel(x) : 1B 50us; {} b = kernel(a) : 9B 50us
    """
    wait = "w = wait(rs);"
    before = text.format(wait, "") + "; return w"
    check_pass(sink_under_memory, before, text.format("", wait), {"w": "peak memory"}, Context(budget_bytes=19))
    check_pass(sink_under_memory, before, text.format("", "") + ";" + wait, {"w": "hidden"}, Context(budget_bytes=20))


@pytest.mark.parametrize("behind", ["kernel(x) after=w : 0B 50us", "kernel(g) mutates=g : =g 50us"])
def test_a_weak_edge_and_an_overwriting_stop_a_wait(behind):
    text = f"rs = reduce_scatter(g) @dp : 0B 90us; {{}} a = kernel(x) : 0B 5us; {{}} k = {behind}; return w"
    wait = "w = wait(rs);"
    check_pass(sink_under_memory, text.format(wait, ""), text.format("", wait), {"w": "has to come before k"})


def test_unknown_communication_stops_a_wait():
    text = "rs = reduce_scatter(g) @dp : 0B 9us; {} a = kernel(x) : 0B 5us; {} c = comm:send(x) @pp; return w"
    wait = "w = wait(rs);"
    check_pass(sink_under_memory, text.format(wait, ""), text.format("", wait), {"w": "c is a barrier"})


def test_a_wait_stays_where_the_queue_is_the_bottleneck():
    text = """
        r0 = reduce_scatter(g) @dp : 0B 50us; s0 = wait(r0); r1 = reduce_scatter(h) @dp : 0B 50us
        a = kernel(x) : 0B 20us; s1 = wait(r1); y = kernel(s1, a) : 0B 50us; return s0
    """
    check_pass(
        sink_under_memory,
        text,
        text,
        {"s0": "waiting later gains nothing: r1 is next on this queue", "s1": "y reads it"},
    )


def test_a_wait_does_not_pass_the_wait_of_the_next_collective_on_its_queue():
    """r0 ends before r1, so after s1, which waits for r1, the wait for r0 would gain nothing."""
    text = """
        r0 = reduce_scatter(g) @dp : 0B 100us; r1 = reduce_scatter(h) @dp : 0B 5us
        s0 = wait(r0); o = kernel(s0) : 0B 20us; s1 = wait(r1); y = kernel(s1) : 0B 50us; return o
    """
    check_pass(sink_under_memory, text, text, {"s0": "waiting later gains nothing: s1 is next on this queue"})


def test_cheap_work_on_the_result_moves_with_its_wait():
    report = check_pass(
        sink_under_memory,
        before="""
            rs = reduce_scatter(g) @dp : 0B 80us; w = wait(rs); v = view(w); o = kernel(v) : 0B 5us
            a = kernel(x) : 0B 100us; return o
        """,
        after="rs = reduce_scatter(g) @dp; a = kernel(x); w = wait(rs); v = view(w); o = kernel(v); return o",
        reasons={"w": "hidden"},
    )
    assert report.moved_with == {"w": ("o", "v")}


def test_costly_work_on_the_result_does_not_move():
    text = """
        rs = reduce_scatter(g) @dp : 0B 80us; w = wait(rs); o = kernel(w) : 0B 50us; a = kernel(x) : 0B 100us; return o
    """
    check_pass(sink_under_memory, text, text, {"w": "o reads it"})


def test_work_that_hides_another_collective_does_not_move():
    """`o` needs the result of rs and is the only node that hides t: moving the wait and `o` after u would expose t."""
    text = """
        rs = reduce_scatter(g) @dp : 0B 100us; t = all_gather(q) @tp : 0B 20us; w = wait(rs); o = kernel(w) : 0B 20us
        u = wait(t); return o, u
    """
    check_pass(sink_under_memory, text, text, {"w": "would expose u"})


def test_a_collective_without_an_estimate_is_waited_for_as_late_as_possible():
    check_pass(
        sink_under_memory,
        before="rs = reduce_scatter(g) @dp; w = wait(rs); a = kernel(x) : 0B 5us; b = kernel(a) : 0B 5us; return w",
        after="rs = reduce_scatter(g) @dp; a = kernel(x); b = kernel(a); w = wait(rs); return w",
        reasons={"w": "end of schedule"},
    )


def test_a_move_that_simulates_slower_is_undone():
    """Overlapped, the gather takes 20 ns, in which the kernel does 7 ns of its work: 113 ns in total instead of 110."""
    profile = DeviceProfile("slow", slowdowns={"other": Slowdown(3.0, 3.0)}, collective_slowdown=2.0)
    text = "a = all_gather(p) @dp : 1B 10ns; w = wait(a); h = kernel(x) : 1B 100ns; y = kernel(h, w) : 1B"
    check_pass(
        sink_under_memory, text, text, {"w": "undone: the simulated step became longer"}, Context(profile=profile)
    )


def test_a_late_reduction_leaves_room_for_the_one_before_it():
    """If only s1 were considered, it would move just before `c`; s0 would then have to come earlier and be exposed."""
    moved, report = sink_under_memory(
        parse("""
            r0 = reduce_scatter(g) @dp : 0B 50us; r1 = reduce_scatter(h) @dp : 0B 50us; s0 = wait(r0); s1 = wait(r1)
            a = kernel(x) : 0B 50us; b = kernel(a) : 0B 50us; c = kernel(b) : 0B 50us; return s0, s1
        """),
        Context(),
    )
    assert simulate(moved).exposed_ns == 0
    assert order_of(moved) == ["r0", "r1", "a", "s0", "b", "s1", "c"]
    assert report.reasons == {"s0": "hidden", "s1": "hidden"}


def test_a_bucket_is_exposed_at_its_first_wait():
    check_pass(
        sink_under_memory,
        before="""
            r, t = reduce_scatter(g, h) @dp : 1B, 1B 40us; s = wait(r); a = kernel(x) : 0B 50us; u = wait(t)
            b = kernel(a) : 0B 50us; return s, u
        """,
        after="r, t = reduce_scatter(g, h) @dp; a = kernel(x); s = wait(r); u = wait(t); b = kernel(a); return s, u",
        reasons={"s": "hidden", "u": "hidden"},
    )


def in_flight(count: int) -> st.SearchStrategy[str]:
    """Draw the text of a schedule: kernels, starts on two queues, and their waits in the order of the starts."""

    def text(times: list[tuple[int, int, int, str]]) -> str:
        lines, waits = ["k = kernel(x)"], []
        for at, (kernel_ns, collective_ns, waited, group) in enumerate(times):
            lines.append(f"k{at} = kernel(x) : 0B {kernel_ns}ns; c{at} = all_gather(p) @{group} : 0B {collective_ns}ns")
            waits.append(f"w{at} = wait(c{at})")
            lines += waits[:waited]
            del waits[:waited]
        return "; ".join([*lines, *waits])

    one = st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 2), st.sampled_from(["dp", "tp"]))
    return st.lists(one, min_size=1, max_size=count).map(text)


@given(in_flight(8))
@settings(max_examples=100)
def test_a_mirrored_schedule_takes_equally_long(text):
    schedule = parse(text)
    queues = Queues.of(schedule, simulate(schedule))
    mirrored = queues.mirrored()
    forward = backward = 0.0
    for at in range(len(schedule.nodes)):
        forward, backward = queues.step(at, forward), mirrored.step(at, backward)
    assert forward == backward == simulate(schedule).step_ns
    again = mirrored.mirrored()
    assert (again.kinds, again.collective, again.opened_by, again.closed_by, again.previous, again.next) == (
        queues.kinds, queues.collective, queues.opened_by, queues.closed_by, queues.previous, queues.next
    )  # fmt: skip


@given(schedules(most_nodes=20), st.sampled_from([None, 0, 3]))
@settings(max_examples=300)
def test_random_schedules_keep_what_every_pass_keeps(schedule, room):
    slow = DeviceProfile(
        "slow", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.5, launch_ns=2.0, synchronous=True
    )
    budget = None if room is None else peak(schedule) + room
    for ctx in (Context(budget_bytes=budget, check_memory=True), Context(profile=slow, overlap_margin=1.5)):
        moved, report = sink_under_memory(schedule, ctx)
        check_invariants(schedule, moved, ctx)
        assert set(report.limits.values()) <= set(Reason)
