from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.estimators.timeline import simulate
from overlapc.passes.base import Context
from overlapc.passes.order import Order
from overlapc.schedule.text import parse
from overlapc.schedule.verify import verify
from tests.graphs import peak, schedules

GATHER = parse("""
    k = kernel(x) : 8B 9us; c = kernel(p) : 8B 1us; ag = all_gather(c) @dp : 8B 9us; w = wait(ag); v = view(w)
    y = kernel(k, v) : 8B 9us; u = kernel(x) : 8B
""")


def names_of(order: Order) -> list[str]:
    return [order.schedule.nodes[at].name for at in order.order]


def moved(node: str, distance: int, most: int = 9, ctx: Context = Context()) -> list[str] | None:  # noqa: B008
    order = Order(GATHER, ctx)
    move = order.shift(GATHER.position(node), distance, most)
    if move is None:
        return None
    order.make(move)
    return names_of(order)


def test_the_nodes_that_a_node_depends_on_move_with_it():
    assert moved("ag", -2) == ["c", "ag", "k", "w", "v", "y", "u"]
    assert moved("w", -3) == ["c", "ag", "w", "k", "v", "y", "u"]
    assert moved("k", 3) == ["c", "ag", "w", "k", "v", "y", "u"]
    assert moved("c", 4) is None  # the nodes after it need it


def test_impossible_and_too_large_moves_and_moves_of_unknown_length_are_none():
    assert moved("k", -1) is None
    assert moved("ag", -2, most=1) is None
    assert moved("u", -1) is None


@given(schedules(), st.data())
@settings(max_examples=100)
def test_any_moves_are_valid_and_have_the_predicted_cost(schedule, data):
    ctx = Context(reorder_collectives=data.draw(st.booleans()), check_memory=True)
    order = Order(schedule, ctx, [schedule])
    for _ in range(8):
        node = data.draw(st.integers(0, len(schedule.nodes) - 1))
        move = order.shift(node, data.draw(st.integers(-9, 9)), most=6)
        if move is None:
            continue
        (timing,), within = order.timings_with(move), order.peak_with(move)
        order.make(move)
        now = schedule.replace_order(names_of(order), reorder_collectives=ctx.reorder_collectives)
        verify(now, "test", reference=schedule, may_reorder_collectives=ctx.reorder_collectives)
        assert timing.step_ns == simulate(now).step_ns
        assert within <= peak(now)
