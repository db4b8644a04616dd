"""Loop bodies: equal values are one object, rewrites compute the same, loops have a canonical form."""

from __future__ import annotations

import sympy
import torch
from hypothesis import given, settings

from overlapc.ir.body import Body, Constant, Index, Loop, Reduce, compute_dtype, depends_on, op, reduction_depth
from overlapc.ir.indexing import loop_symbol
from overlapc.ir.rewriting import canonical, with_loops
from tests.ir.bodies import P, R, bodies, buffers_for, flat, loops_of, put, x
from tests.ir.interpret import run_body


def results(body: Body) -> dict[str, torch.Tensor]:
    memory = buffers_for(body)
    run_body(body, memory)
    return memory


def assert_same(first: Body, second: Body) -> None:
    one, other = results(first), results(second)
    assert one.keys() == other.keys()
    for name in one:
        assert torch.equal(one[name], other[name]), f"{name} differs\n{first}\n{second}"


@settings(max_examples=200)
@given(bodies())
def test_a_canonical_body_computes_the_same(body: Body) -> None:
    assert_same(body, canonical(body))


@settings(max_examples=100)
@given(bodies())
def test_canonical_is_idempotent_and_names_loops_in_order(body: Body) -> None:
    once = canonical(body)
    assert canonical(once) == once
    assert [loop.symbol for loop in once.loops] == P[: len(once.loops)]
    assert [loop.symbol for loop in once.reduction] == R[: len(once.reduction)]
    assert bool(once.reduction) == bool(body.reduction)


def test_neighbouring_loops_merge_where_every_index_is_flat() -> None:
    loops = loops_of("p", (4, 1, 3))
    whole = canonical(Body(loops, (), (put("y", flat(loops), x("a", flat(loops))),)))
    assert whole.loops == loops_of("p", (12,))
    transposed = canonical(Body(loops, (), (put("y", flat(loops), x("a", P[0] + 4 * P[2])),)))
    assert transposed.loops == loops_of("p", (4, 3))


def test_a_reduction_over_one_element_stays_a_reduction() -> None:
    body = Body(loops_of("p", (4,)), loops_of("r", (1,)), (put("y", P[0], Reduce("sum", x("a", P[0]), torch.float32)),))
    assert canonical(body).reduction == loops_of("r", (1,))


def test_a_body_over_split_loops_computes_the_same() -> None:
    body = Body(loops_of("p", (12,)), (), (put("y", P[0], x("a", 11 - P[0])),))
    outer, inner = loops_of("q", (3, 4))
    split = with_loops(body, {P[0]: 4 * outer.symbol + inner.symbol}, (outer, inner), ())
    assert_same(body, split)


def test_equal_values_are_one_object() -> None:
    assert op("add", x("a", P[0]), x("b", P[0])) is op("add", x("a", P[0]), x("b", P[0]))
    assert x("a", P[0]) is not x("a", P[1])
    assert Constant(0.0, torch.float32) is not Constant(-0.0, torch.float32)
    assert Constant(1, torch.int64) is not Constant(True, torch.int64)


def test_bodies_are_equal_if_their_buffers_have_equal_names() -> None:
    def layer(name: str) -> Body:
        return canonical(Body(loops_of("p", (2, 3)), (), (put("y", 3 * P[0] + P[1], x(name, 3 * P[0] + P[1])),)))

    assert layer("a") == layer("a")
    assert hash(layer("a")) == hash(layer("a"))
    assert layer("a") != layer("b")


def test_the_result_of_a_reduction_does_not_depend_on_its_loops() -> None:
    element = x("a", 4 * P[0] + R[0])
    total = Reduce("sum", element, torch.float32)
    centred = op("sub", element, total)
    varies = depends_on((centred,), R)
    assert (varies[element], varies[total], varies[centred]) == (True, False, True)
    depth = reduction_depth((Reduce("max", centred, torch.float32),))
    assert (depth[element], depth[total], depth[centred], max(depth.values())) == (0, 1, 1, 2)


def test_size_symbols_lists_the_sizes_that_a_launch_must_pass() -> None:
    size = sympy.Symbol("s7", integer=True, positive=True)
    rows = loop_symbol("p", 0)
    body = Body(
        (Loop(rows, size),), (), (put("y", rows, op("add", x("a", rows * size), Constant(1.0, torch.float32))),)
    )
    assert body.size_symbols() == [size]
    assert Index(size).indices() == (size,)


def test_low_precision_is_computed_in_fp32() -> None:
    assert compute_dtype(torch.bfloat16) == torch.float32
    assert compute_dtype(torch.int8) == torch.int8
    assert x("a", P[0], torch.bfloat16).dtype == torch.float32
