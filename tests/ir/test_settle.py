"""Arithmetic on positions becomes an index expression of the same value, or stays."""

from __future__ import annotations

import sympy
import torch
from hypothesis import given
from hypothesis import strategies as st

from overlapc.ir.body import Body, Checked, Constant, Index, Load, Store, Value, op
from overlapc.ir.rewriting import rewrite_values
from overlapc.ir.settle import ARITHMETIC, settled, with_known_positions
from tests.ir.bodies import P, loops_of, put
from tests.ir.interpret import run_body

LOOPS = loops_of("p", (4, 6))


def number(value: int, dtype: torch.dtype = torch.int64) -> Constant:
    return Constant(value, dtype)


@st.composite
def arithmetic(draw: st.DrawFn) -> Value:
    value: Value = Index(draw(st.sampled_from((P[0], P[1], 6 * P[0] + P[1], 5 - P[1]))))
    for _ in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from(sorted(ARITHMETIC)))
        other = number(draw(st.integers(-9, 9).filter(bool)))  # a divisor is not 0
        last = name in ("add", "sub", "mul") and draw(st.booleans())
        value = op(name, *((other, value) if last else (value, other)))
    return value


def results(value: Value) -> torch.Tensor:
    y = torch.zeros(24, dtype=torch.int64)
    run_body(Body(LOOPS, (), (Store("y", 6 * P[0] + P[1], value, torch.int64),)), {"y": y})
    return y


@given(arithmetic())
def test_arithmetic_on_positions_keeps_its_value(value: Value) -> None:
    ranges = Body(LOOPS, (), ()).ranges()
    assert torch.equal(
        results(rewrite_values([value], replace=lambda each: settled(each, ranges))[value]), results(value)
    )


def test_a_remainder_of_a_moved_position_is_an_index() -> None:
    ranges = Body(LOOPS, (), ()).ranges()
    moved = settled(op("add", Index(P[1]), number(3)), ranges)
    assert isinstance(settled(op("fmod", moved, number(6)), ranges), Index)
    assert settled(op("fmod", moved, number(12)), ranges) is moved


def test_arithmetic_that_may_wrap_around_or_divide_by_zero_stays() -> None:
    ranges = Body(LOOPS, (), ()).ranges()
    wide = op("mul", Index(P[0], torch.int32), number(2**30, torch.int32))
    large = op("add", Index(P[0]), number(2**30))  # as an index, it would make all others 64 bits wide
    for value in (wide, large, op("floor_div", Index(P[0]), number(0)), op("fmod", Index(P[0] - 2), number(3))):
        assert settled(value, ranges) is value


def test_an_indirect_load_at_a_computed_position_becomes_a_plain_one() -> None:
    at = op("fmod", op("add", Index(P[1]), number(4)), number(6))
    inside = op("logical_and", op("ge", at, number(0)), op("lt", at, Index(sympy.Integer(6))))
    i0 = sympy.Symbol("i0", integer=True)
    load = Load("a", 6 * P[0] + i0, torch.float32, inside, ((i0, Checked(at, inside, "out of bounds")),))
    body = Body(LOOPS, (), (put("y", 6 * P[0] + P[1], load),))
    plain = with_known_positions(body)
    assert not plain.checks()
    assert not any(each.operands() for each in plain.loads())
    a, y = torch.randn(24), torch.zeros(24)
    run_body(plain, {"a": a, "y": y})
    assert torch.equal(y.view(4, 6), a.view(4, 6).roll(-4, 1))
