"""A graph that one rank recompiles for other sizes launches collectives in an order that is compatible with ranks that
still run the earlier graph."""

from __future__ import annotations

from dataclasses import replace

from overlapc.fx.comm.taken_out import TAKEN_OUT
from overlapc.ir.ops import Extern
from overlapc.passes.base import Context
from overlapc.passes.run import Result, run_pipeline
from overlapc.planning.agreed import Agreed, Followed
from overlapc.planning.agreed_order import agreed_on, follow, may_run_beside
from overlapc.schedule.model import Schedule
from overlapc.schedule.text import parse
from tests.graphs import order_of

TP = (0, 1)
STEP = """
    a = all_gather(%p) @dp(2) ranks=0,2 : 64B 5us; v = wait(a)
    b = all_gather(%q) @dp(2) ranks=0,2 : 64B 5us; w = wait(b)
    y = kernel(%x, v) : {0}B 9us; c = all_reduce(y) @tp(2) ranks=0,1 : {0}B 5us; z = wait(c)
    u = kernel(z, w) : {0}B 9us; return u
"""


def planned(schedule: Schedule, order: str) -> Agreed:
    """Return the agreement of ranks on `schedule` in the given order (names)."""
    moved = schedule.replace_order(order.split(), reorder_collectives=True)
    return agreed_on(schedule, run_pipeline(moved, Context(passes=())))


def following(schedule: Schedule, followed: Followed[Agreed]) -> list[tuple[Result, Agreed]]:
    results = follow(schedule, followed, Context())
    return [(result, agreed_on(schedule, result, followed)) for result in results]


EARLIER = planned(parse(STEP.format(32)), "b w a v y c z u")


def test_groups_of_ranks_that_did_not_recompile_keep_their_order():
    other_sizes = parse(STEP.format(20))
    found = following(other_sizes, Followed(EARLIER, frozenset({"tp"}), TP))
    assert found
    for result, agreed in found:
        starts = [name for name in order_of(result.schedule) if name in ("a", "b")]
        assert starts == ["b", "a"]
        assert may_run_beside(agreed, Followed(EARLIER, frozenset({"tp"}), TP))
        assert not may_run_beside(agreed, Followed(EARLIER)), (
            "ranks of @tp launch other collectives and did not compile together"
        )
    in_its_own_order = planned(other_sizes, "a v b w y c z u")
    assert not may_run_beside(in_its_own_order, Followed(EARLIER, frozenset({"tp"}), TP))


def test_collectives_are_matched_by_their_position_in_the_group():
    gathers_more = STEP.replace("y = kernel", "n = all_gather(%x) @tp(2) ranks=0,1 : 8B 5us; m = wait(n); y = kernel")
    renamed = parse(gathers_more.format(20).replace("b = ", "d = ").replace("wait(b)", "wait(d)"))
    (result, agreed), *_ = following(renamed, Followed(EARLIER, frozenset({"tp"}), TP))
    assert [name for name in order_of(result.schedule) if name in ("a", "d")] == ["d", "a"]
    assert may_run_beside(agreed, Followed(EARLIER, frozenset({"tp"}), TP))


def of_params(schedule: Schedule, **params: int) -> Schedule:
    """Return the schedule with collectives (by name) that serve parameters of these numbers, all called `weight`."""
    nodes = tuple(
        replace(node, comm=replace(node.comm, param="weight", param_number=params[node.name]))
        if node.comm is not None and node.name in params
        else node
        for node in schedule.nodes
    )
    return replace(schedule, nodes=nodes)


def test_collectives_of_parameters_are_matched_by_the_parameter():
    """Torch may order the gathers of backward in another way for other sizes, and modules that were sharded by
    themselves may have parameters of one name."""
    text = "a = all_gather(%p) @dp(2) : {}B 5us; v = wait(a); b = all_gather(%q) @dp(2) : {}B 5us; w = wait(b)"
    schedule, turned = (parse(f"{text.format(*sizes)}; return v, w") for sizes in ((64, 8), (8, 64)))
    followed = Followed(planned(of_params(schedule, a=3, b=5), "a b v w"))
    found = following(of_params(turned, a=5, b=3), followed)
    assert found
    for result, agreed in found:
        assert [name for name in order_of(result.schedule) if name in ("a", "b")] == ["b", "a"]
        assert may_run_beside(agreed, followed)
    of_no_parameters = Followed(planned(schedule, "a b v w"))
    assert not any(may_run_beside(agreed, of_no_parameters) for _, agreed in following(turned, of_no_parameters))


def test_groups_that_do_not_change_keep_one_common_order():
    """Otherwise ranks of a mesh with several axes could deadlock, each waiting for another."""
    text = STEP.replace("b = all_gather(%q) @dp(2) ranks=0,2", "b = all_gather(%q) @rep(2) ranks=0,4")
    earlier = planned(parse(text.format(32)), "b w a v y c z u")
    other_sizes = parse(text.format(20))
    followed = Followed(earlier, frozenset({"tp"}), TP)
    for _, agreed in following(other_sizes, followed):
        assert may_run_beside(agreed, followed)
    assert not may_run_beside(planned(other_sizes, "a v b w y c z u"), followed)


def test_waits_sink_also_where_launches_of_several_groups_must_not_move():
    text = STEP.replace("b = all_gather(%q) @dp(2) ranks=0,2", "b = all_gather(%q) @rep(2) ranks=0,4")
    text = text.replace("a = all_gather(%p)", "k = kernel(%p) : 32B 20us; a = all_gather(k)")
    followed = Followed(planned(parse(text.format(32)), "k a v b w y c z u"), frozenset({"tp"}), TP)
    found = following(parse(text.format(20)), followed)
    best = next(result for result, agreed in found if may_run_beside(agreed, followed))
    assert order_of(best.schedule) == "k a b v y c w z u".split()


def test_buckets_are_those_of_the_earlier_graph():
    bucketed = replace(EARLIER, launches=(("a+1", ("a", "b")), ("c", ("c",))))
    followed = Followed(bucketed, frozenset({"tp"}), TP)
    for result, agreed in following(parse(STEP.format(20)), followed):
        assert [name for name in order_of(result.schedule) if name.startswith(("a", "b"))] == ["a+1"]
        assert may_run_beside(agreed, followed)


def test_slots_of_a_launch_are_free_before_the_next_one_if_results_are_taken_out():
    """Also those of members whose results are in no slots: the part that each rank sends is in one until the wait."""
    text = """
        a = all_gather(%p) @dp(2) ranks=0,2 : 64B 5us; v = wait(a); t = extern:taken_out(v) : 64B 1us
        e = all_gather(%r) @dp(2) ranks=0,2 : 64B 5us; x = wait(e); y = kernel(t, x) : 64B 9us
        b = all_gather(%q) @dp(2) ranks=0,2 : 64B 5us; w = wait(b); u = kernel(y, w) : 64B 9us; return u
    """
    schedule = parse(text)
    copied = Extern("t", TAKEN_OUT, (), {}, None)
    nodes = tuple(replace(node, payload=copied) if node.name == "t" else node for node in schedule.nodes)
    schedule = Schedule(schedule.name, nodes, schedule.buffers, schedule.outputs, schedule.budget_bytes)
    bucketed = replace(planned(schedule, "a b v t w e x y u"), launches=(("a+1", ("a", "b")), ("e", ("e",))))
    orders = [order_of(result.schedule) for result, _ in following(schedule, Followed(bucketed))]
    assert any(max(order.index(each) for each in "vtw") < order.index("e") for order in orders)


def test_an_order_that_data_does_not_allow_is_not_followed():
    needs_a_first = STEP.replace("all_gather(%q)", "all_gather(v)")
    assert not following(parse(needs_a_first.format(32)), Followed(EARLIER))
