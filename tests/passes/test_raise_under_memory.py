import pytest
from hypothesis import given, settings

from overlapc.errors import ScheduleError
from overlapc.estimators.device import DeviceProfile, Slowdown
from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context
from overlapc.passes.raise_under_memory import raise_under_memory
from overlapc.passes.reasons import Reason
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify
from tests.graphs import check_invariants, check_order, check_pass, schedules


def test_a_start_moves_up_until_it_is_hidden():
    check_pass(
        raise_under_memory,
        before="""
            a = kernel(x) : 0B 100us; b = kernel(a) : 0B 100us
            ag = all_gather(p) @dp : 0B 80us; w = wait(ag); y = kernel(b, w) : 0B 1us
        """,
        after="a = kernel(x); ag = all_gather(p) @dp; b = kernel(a); w = wait(ag); y = kernel(b, w)",
        reasons={"ag": "hidden"},
    )


def test_a_start_that_is_hidden_stays():
    text = "ag = all_gather(p) @dp : 0B 80us; a = kernel(x) : 0B 100us; w = wait(ag); y = kernel(a, w)"
    schedule = parse("first = kernel(x) : 0B 9us;" + text)
    moved, report = raise_under_memory(schedule, Context())
    assert moved is schedule
    assert (report.reasons, report.limits) == ({"ag": "hidden"}, {"ag": Reason.HIDDEN})


def test_the_start_of_the_schedule_stops_a_start():
    check_pass(
        raise_under_memory,
        before="a = kernel(x) : 0B 10us; ag = all_gather(p) @dp : 0B 80us; w = wait(ag); y = kernel(a, w)",
        after="ag = all_gather(p) @dp; a = kernel(x); w = wait(ag); y = kernel(a, w)",
        reasons={"ag": "start of schedule"},
    )


def test_a_data_dependence_stops_a_start():
    check_pass(
        raise_under_memory,
        before="a = kernel(x) : 0B 50us; b = kernel(x) : 0B 10us; rs = reduce_scatter(a) @dp : 0B 80us; w = wait(rs)",
        after="a = kernel(x); rs = reduce_scatter(a) @dp; b = kernel(x); w = wait(rs)",
        reasons={"rs": "data dependence on a"},
    )


def test_cheap_nodes_that_a_start_needs_move_with_it():
    report = check_pass(
        raise_under_memory,
        before="""
            h = kernel(x) : 0B 100us; c = kernel(p) : 0B 5us; v = view(c)
            ag = all_gather(v) @dp : 0B 80us; w = wait(ag); y = kernel(h, w)
        """,
        after="c = kernel(p); v = view(c); ag = all_gather(v) @dp; h = kernel(x); w = wait(ag); y = kernel(h, w)",
        reasons={"ag": "hidden"},
    )
    assert report.moved_with == {"ag": ("c", "v")}


def test_memory_stops_a_start():
    text = "a = kernel() : 4B 50us; {} b = kernel(a) : 8B 50us; {} y = kernel(b, w) : 1B 1us"
    gather = "ag = all_gather(p) @dp : 6B 80us;"
    before = text.format("", gather + "w = wait(ag);")
    check_pass(raise_under_memory, before, before, {"ag": "peak memory"}, Context(budget_bytes=17))
    report = check_pass(
        raise_under_memory,
        before,
        gather + text.format("", "w = wait(ag);"),
        {"ag": "hidden"},
        Context(budget_bytes=18),
    )
    assert report.moves == {"ag": 2}


def test_memory_stops_a_start_where_it_has_no_more_room():
    text = """
        k = kernel() : 30B 10us; j = kernel(k) : 1B 1us; {} a = kernel() : 4B 50us; b = kernel(a) : 2B 50us; {}
        y = kernel(b, j) : 1B 1us; w = wait(ag); z = kernel(w, y)
    """
    gather = "ag = all_gather(p) @dp : 9B 999us;"
    before, after = text.format("", gather), text.format(gather, "")
    check_pass(raise_under_memory, before, after, {"ag": "peak memory"}, Context(budget_bytes=31))


def test_costly_nodes_that_a_start_needs_do_not_move_with_it():
    text = """
        h = kernel(x) : 0B 100us; c = kernel(p) : 0B {}us; d = kernel(c) : 0B {}us
        ag = all_gather(d) @dp : 0B 80us; w = wait(ag); y = kernel(h, w)
    """
    check_pass(raise_under_memory, text.format(1, 21), text.format(1, 21), {"ag": "data dependence on d"})
    check_pass(raise_under_memory, text.format(11, 10), text.format(11, 10), {"ag": "data dependence on c"})


def test_a_node_of_unknown_cost_does_not_move_with_a_start():
    text = "h = kernel(x) : 0B 100us; c = kernel(p); ag = all_gather(c) @dp : 0B 80us; w = wait(ag); y = kernel(h, w)"
    check_pass(raise_under_memory, text, text, {"ag": "data dependence on c"})


def test_the_order_of_the_group_stops_a_start():
    check_pass(
        raise_under_memory,
        before="""
            a = kernel(x) : 0B 10us; ag0 = all_gather(p) @dp : 0B 9us; b = kernel(a) : 0B 5us
            ag1 = all_gather(q) @dp : 0B 20us; w1 = wait(ag1); c = kernel(w1, b) : 0B 50us; w0 = wait(ag0)
        """,
        after="""
            ag0 = all_gather(p) @dp; ag1 = all_gather(q) @dp; a = kernel(x); b = kernel(a)
            w1 = wait(ag1); c = kernel(w1, b); w0 = wait(ag0)
        """,
        reasons={"ag1": "queue busy with ag0"},
    )


def test_a_start_does_not_move_to_where_its_queue_is_busy():
    check_pass(
        raise_under_memory,
        before="""
            ag0 = all_gather(p) @dp : 0B 100us; a = kernel(x) : 0B 60us; b = kernel(a) : 0B 60us
            w0 = wait(ag0); ag1 = all_gather(q) @dp : 0B 100us; w1 = wait(ag1); y = kernel(w0, w1, b)
        """,
        after="""
            ag0 = all_gather(p) @dp; a = kernel(x); ag1 = all_gather(q) @dp; b = kernel(a)
            w0 = wait(ag0); w1 = wait(ag1); y = kernel(w0, w1, b)
        """,
        reasons={"ag1": "queue busy with ag0"},
    )


def test_an_early_gather_makes_room_for_the_next():
    """If only ag0 were considered, it would begin under `b`, and no compute would be left to hide ag1."""
    moved, report = raise_under_memory(
        parse("""
            a = kernel(x) : 0B 50us; b = kernel(a) : 0B 50us; ag0 = all_gather(p) @dp : 0B 50us; w0 = wait(ag0)
            c = kernel(b, w0) : 0B 1us; ag1 = all_gather(q) @dp : 0B 50us; w1 = wait(ag1); y = kernel(w1, c)
        """),
        Context(),
    )
    assert simulate(moved).exposed_ns == 0
    assert report.reasons == {"ag0": "hidden", "ag1": "hidden"}


def test_unknown_communication_stops_a_start():
    check_pass(
        raise_under_memory,
        before="c = comm:send(x) @pp; a = kernel(x) : 0B 5us; ag = all_gather(p) @dp : 0B 9us; w = wait(ag)",
        after="c = comm:send(x) @pp; ag = all_gather(p) @dp; a = kernel(x); w = wait(ag)",
        reasons={"ag": "c is a barrier"},
    )


def test_safe_blocking_communication_is_passed_like_compute():
    """A blocking collective marked safe does not move itself, but gathers of other groups pass it."""
    check_pass(
        raise_under_memory,
        before="c = comm:swap(x) @tp safe=yes : 0B 9us; ag = all_gather(p) @dp : 0B 9us; w = wait(ag)",
        after="ag = all_gather(p) @dp; c = comm:swap(x) @tp; w = wait(ag)",
        reasons={"ag": "start of schedule"},
    )
    check_pass(
        raise_under_memory,
        before="c = comm:swap(x) @dp safe=yes : 0B 9us; ag = all_gather(p) @dp : 0B 9us; w = wait(ag)",
        after="c = comm:swap(x) @dp; ag = all_gather(p) @dp; w = wait(ag)",
    )


def test_a_weak_edge_stops_a_start():
    check_pass(
        raise_under_memory,
        before="k = kernel(x) : 0B 5us; a = kernel(x) : 0B 5us; ag = all_gather(p) @dp after=k : 0B 9us; w = wait(ag)",
        after="k = kernel(x); ag = all_gather(p) @dp after=k; a = kernel(x); w = wait(ag)",
        reasons={"ag": "has to come after k"},
    )


def test_work_that_hides_another_collective_does_not_move():
    """ag needs the cast c, which is the only node that hides t: raising both before t would expose t."""
    report = check_pass(
        raise_under_memory,
        before="""
            t = all_gather(q) @tp : 0B 20us; c = kernel(p) : 0B 20us
            ag = all_gather(c) @dp : 0B 100us; u = wait(t); w = wait(ag); y = kernel(a, u, w)
        """,
        after="""
            t = all_gather(q) @tp; c = kernel(p); ag = all_gather(c) @dp; u = wait(t); w = wait(ag); y = kernel(a, u, w)
        """,
    )
    assert report.reasons["ag"] == "would expose t"


def test_a_start_without_an_estimate_moves_as_far_as_it_may():
    check_pass(
        raise_under_memory,
        before="a = kernel(x) : 0B 5us; b = kernel(a) : 0B 5us; ag = all_gather(p) @dp; w = wait(ag); y = kernel(w)",
        after="ag = all_gather(p) @dp; a = kernel(x); b = kernel(a); w = wait(ag); y = kernel(w)",
        reasons={"ag": "start of schedule"},
    )


BACKWARD = """
    b1 = kernel(x) : 0B 100us; g1 = kernel(b1) : 0B 10us; rs1 = reduce_scatter(g1) @dp : 0B 60us; s1 = wait(rs1)
    ag0 = all_gather(p) @dp : 0B 60us; w0 = wait(ag0); b0 = kernel(w0, b1) : 0B 100us; return s1
"""


def test_a_gather_passes_the_scatter_before_it_only_where_that_is_allowed():
    moved = """
        ag0 = all_gather(p) @dp; b1 = kernel(x); g1 = kernel(b1); rs1 = reduce_scatter(g1) @dp; s1 = wait(rs1)
        w0 = wait(ag0); b0 = kernel(w0, b1)
    """
    check_pass(raise_under_memory, BACKWARD, moved, {"ag0": "hidden"}, Context(reorder_collectives=True))
    check_pass(raise_under_memory, BACKWARD, BACKWARD, {"ag0": "queue busy with rs1"})


def test_a_new_order_of_collectives_is_kept_from_then_on():
    schedule, _ = raise_under_memory(parse(BACKWARD), Context(reorder_collectives=True))
    verify(schedule, "test")
    with pytest.raises(ScheduleError, match="rs1 was moved before ag0"):
        verify(schedule.move("ag0", after="rs1"), "test")
    with pytest.raises(ScheduleError, match="ag0 starts in the place of rs1"):
        verify(schedule, "test", reference=parse(BACKWARD))


def test_a_start_does_not_pass_one_that_it_would_expose_as_much():
    text = """
        a = kernel(x) : 0B 10us; b = kernel(a) : 0B 10us; g0 = all_gather(p) @dp : 0B 50us
        k = kernel(b) : 0B 40us; g1 = all_gather(q) @dp : 0B 50us; w0 = wait(g0); w1 = wait(g1); y = kernel(w0, w1, k)
    """
    _, report = raise_under_memory(parse(text), Context(reorder_collectives=True))
    assert report.reasons["g1"] == "queue busy with g0"


def test_a_gather_does_not_pass_what_it_depends_on():
    text = """
        b1 = kernel(x) : 0B 100us; rs1 = reduce_scatter(b1) @dp : 0B 60us; s1 = wait(rs1)
        g = all_gather(s1) @dp : 0B 60us; w = wait(g)
    """
    check_pass(raise_under_memory, text, text, {"g": "queue busy with rs1"}, Context(reorder_collectives=True))


def test_a_start_that_takes_work_along_does_not_pass_another():
    """Because the gain of passing is computed without that work."""
    text = """
        k = kernel(x) : 0B 100us; r = reduce_scatter(k) @dp : 0B 5us; c = kernel(p) : 0B 20us
        g = all_gather(c) @dp : 0B 100us; w = wait(g); y = kernel(w, k) : 0B 90us; s = wait(r)
    """
    check_pass(raise_under_memory, text, text, {"g": "would expose r"}, Context(reorder_collectives=True))


# Rule -> (schedule, resulting order). Without the rule the order would differ.
ORDERS = {
    "a start that passed another follows the one before that": (
        """
        k = kernel(x) : 0B 20us; m = comm:swap(k) @dp safe=yes : 0B 5us; g = all_gather(k) @dp : 0B 100us; w = wait(g)
        h = all_gather(p) @dp : 0B 100us; v = wait(h); y = kernel(k, v) : 0B 50us
        """,
        "k m h g w v y",
    ),
    "a start that is passed has to make room for the one that passed it": (
        """
        k = kernel(x) : 0B 20us; g1 = all_gather(p) @dp : 0B 100us; w1 = wait(g1); c = view(p)
        g3 = all_gather(c) @dp : 0B 20us; g4 = all_gather(p) @dp : 0B 20us; w4 = wait(g4); v = kernel(w4) : 0B 5us
        w3 = wait(g3)
        """,
        "g1 g4 k w1 c g3 w4 v w3",
    ),
    "cheap work that sinks with a wait does not decide when its collective is due": (
        """
        g = all_gather(p) @dp : 0B 100us; h = all_gather(p) @dp : 0B 20us; v = wait(h); w = wait(g)
        y = kernel(x, w) : 0B 5us
        """,
        "h g v w y",
    ),
    "views of views do not decide when a collective is due": (
        """
        g = all_gather(p) @dp : 0B 100us; h = all_gather(p) @dp : 0B 20us; v = wait(h); w = wait(g)
        a = view(w); b = view(a); k = kernel(x) : 0B 50us; y = kernel(x, b) : 0B 90us
        """,
        "h g v w a b k y",
    ),
    "a blocking collective needs its queue when its turn comes": (
        """
        k = kernel(x) : 0B 100us; g = all_gather(p) @dp : 0B 50us; m = comm:swap(k) @dp safe=yes : 0B 20us
        a = kernel(k) : 0B 50us; w = wait(g); b = kernel(a, w) : 0B 50us
        """,
        "g k m a w b",
    ),
    "the order of the queue does not limit how early a start could begin": (
        """
        m = comm:swap(x) @dp safe=yes : 0B 5us; k = kernel(x) : 0B 20us; g = all_gather(p) @dp : 0B 100us
        h = all_gather(p) @dp : 0B 20us; v = wait(h); i = all_gather(p) @dp : 0B 50us; w = wait(g)
        y = kernel(k, w) : 0B 5us; u = wait(i)
        """,
        "m g h k v i w y u",
    ),
    "a start that cannot move far needs no room made for it": (
        """
        c = view(p); f = all_gather(c) @dp : 0B 20us; u = wait(f); k1 = kernel(x, u) : 0B 50us
        k2 = kernel(k1) : 0B 5us; k3 = kernel(k2) : 0B 20us; k4 = kernel(k3) : 0B 20us
        g = all_gather(p) @dp : 0B 20us; v = wait(g); h = all_gather(k4) @dp : 0B 100us; w = wait(h)
        """,
        "c f u k1 k2 g k3 k4 h v w",
    ),
    "a second round starts from the result of the first one": (
        """
        f = all_gather(p) @dp : 0B 50us; u = wait(f); g = all_gather(p) @dp : 0B 100us; v = wait(g)
        k = kernel(x, v) : 0B 5us; h = all_gather(p) @dp : 0B 50us; w = wait(h)
        """,
        "f g u v h k w",
    ),
}


@pytest.mark.parametrize("rule", ORDERS)
def test_every_rule_makes_a_difference(rule):
    before, after = ORDERS[rule]
    check_order(raise_under_memory, before, after, Context(reorder_collectives=True))


@given(schedules())
@settings(max_examples=200)
def test_random_schedules_keep_what_every_pass_keeps(schedule):
    slow = DeviceProfile(
        "slow", slowdowns={"other": Slowdown(1.5, 2.0)}, collective_slowdown=1.5, launch_ns=2.0, synchronous=True
    )
    contexts = (
        Context(),
        Context(peak_increase=0.0),
        Context(profile=slow),
        Context(reorder_collectives=True),
        Context(reorder_collectives=True, profile=slow),
    )
    for ctx in contexts:
        moved, _ = raise_under_memory(schedule, ctx)
        check_invariants(schedule, moved, ctx)
