"""Which ops must run before which; every test fails if its rule is removed."""

from __future__ import annotations

import sympy

from overlapc.fusion.deps import edges, has_effect, without_dead_ops
from overlapc.ir.ops import Extern, Handle, IROp, LoweredGraph
from tests.fusion.small_graphs import barrier, extern, graph, kernel, names, overwrite, pointwise, start, view, wait
from tests.ir.bodies import loops_of, put, x


def before(made: LoweredGraph) -> dict[str, set[str]]:
    found = edges(made.ops, made)
    return {op.name: {made.ops[n].name for n in found.before[at]} for at, op in enumerate(made.ops)}


def test_a_reader_comes_after_the_writer() -> None:
    made = graph([pointwise("x", "a"), extern("y", "x"), pointwise("z", "y", "b")], ["z"])
    assert before(made) == {"x": set(), "y": {"x"}, "z": {"y"}}


def test_an_overwrite_waits_for_readers_of_the_old_content() -> None:
    made = graph([pointwise("x", "a"), overwrite("add", "a", "b"), pointwise("y", "a__add")], ["x", "y"])
    assert before(made) == {"x": set(), "add": {"x"}, "y": {"add"}}


def test_an_overwrite_waits_for_readers_through_every_alias() -> None:
    ops: list[IROp] = [start("ag", "b"), wait("w", "ag"), pointwise("x", "w"), overwrite("add", "ag", "a")]
    made = graph(ops, ["x"])
    assert before(made)["add"] == {"ag", "w", "x"}


def test_overwrites_of_one_buffer_keep_their_order() -> None:
    ops: list[IROp] = [overwrite("one", "a", "b"), overwrite("two", "a", "c")]
    made = graph(ops, ["a"])
    assert before(made)["two"] == {"one"}


def test_an_input_of_a_start_is_overwritten_only_after_its_wait() -> None:
    ops: list[IROp] = [start("ag", "a"), wait("w", "ag"), overwrite("add", "a", "b")]
    made = graph(ops, ["w"])
    assert before(made)["add"] == {"ag", "w"}


def test_an_op_comes_after_the_op_that_computes_its_size() -> None:
    size = sympy.Symbol("u0", integer=True, positive=True)
    brings = Extern("nz", len, (view("a"),), {}, Handle("nz", size))
    loops = loops_of("p", (1,))
    uses = kernel("x", _body_over(size), view("x", size))
    plain = kernel("y", _body_over(loops[0].size), view("y", 1))
    call = extern("z", "b")
    takes = Extern("t", len, (view("b", size),), {}, view("t"))
    made = graph([brings, uses, plain, call, takes], ["x", "y", "z", "t"], sources={"u0": "nz"})
    found = before(made)
    assert found["x"] == {"nz"}
    assert found["t"] == {"nz"}
    assert found["y"] == set()
    assert found["z"] == set()


def _body_over(size: sympy.Expr):
    from overlapc.ir.body import Body, Loop
    from overlapc.ir.indexing import loop_symbol

    loop = Loop(loop_symbol("p", 0), size)
    return Body((loop,), (), (put("x" if size.is_Symbol else "y", loop.symbol, x("a", loop.symbol)),))


def test_starts_of_one_group_keep_their_order_and_groups_are_independent() -> None:
    ops: list[IROp] = [start("s0", "a"), start("s1", "b", group="tp"), start("s2", "c")]
    made = graph(ops, [])
    assert before(made) == {"s0": set(), "s1": set(), "s2": {"s0"}}


def test_no_communication_is_reordered_with_blocking_communication() -> None:
    ops: list[IROp] = [start("s", "a", group="tp"), barrier("all", "b"), wait("w", "s"), barrier("more", "c")]
    made = graph(ops, ["w", "all", "more"])
    found = before(made)
    assert found["all"] == {"s"}
    assert found["w"] == {"s", "all"}
    assert found["more"] == {"all", "w"}


def test_calls_with_effects_keep_their_order() -> None:
    ops: list[IROp] = [extern("dice", "a", pure=False), extern("pure", "b"), extern("more", "c", pure=False)]
    made = graph(ops, ["dice", "pure", "more"])
    assert before(made) == {"dice": set(), "pure": set(), "more": {"dice"}}
    assert [has_effect(op) for op in ops] == [True, False, True]


def test_ops_read_only_by_dead_ops_are_dead() -> None:
    made = graph([pointwise("x", "a"), pointwise("y", "x"), pointwise("z", "a")], ["z"])
    assert names(without_dead_ops(made)) == ["z"]


def test_ops_with_effects_and_their_inputs_are_not_dead() -> None:
    ops: list[IROp] = [
        pointwise("x", "a"),
        extern("check", "x", pure=False),
        pointwise("y", "b"),
        overwrite("add", "c", "y"),
        start("s", "a"),
        wait("w", "s"),
        pointwise("dead", "w"),
    ]
    assert names(without_dead_ops(graph(ops, []))) == ["x", "check", "y", "add", "s", "w"]


def test_the_op_that_computes_a_returned_size_is_not_dead() -> None:
    size = sympy.Symbol("u0", integer=True, positive=True)
    brings = Extern("nz", len, (view("a"),), {}, Handle("nz", size))
    made = graph([brings, pointwise("x", "a")], [size * 2], sources={"u0": "nz"})
    assert names(without_dead_ops(made)) == ["nz"]
