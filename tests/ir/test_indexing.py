"""Simplified index expressions have the same value at every iteration."""

from __future__ import annotations

import itertools

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv

from overlapc.codegen.cpp.expressions import index_text
from overlapc.ir.indexing import (
    ModularIndexing,
    Ranges,
    at_most,
    bounds,
    exact_quotient,
    flat_index,
    is_dense,
    loop_symbol,
    position_in,
    simplify,
    substitute,
)
from tests.ir.interpret import evaluate

P0, P1, P2 = SYMBOLS = [loop_symbol("p", at) for at in range(3)]
SIZE = sympy.Symbol("s0", integer=True, positive=True)


def ranges_of(sizes: tuple[int, ...]) -> Ranges:
    return tuple((symbol, sympy.S.Zero, sympy.Integer(size - 1)) for symbol, size in zip(SYMBOLS, sizes, strict=False))


def iterations(sizes: tuple[int, ...]) -> list[dict[sympy.Symbol, int]]:
    return [dict(zip(SYMBOLS, at, strict=False)) for at in itertools.product(*map(range, sizes))]


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> sympy.Expr:
    """Draw sums, multiples, quotients and remainders of loop symbols."""
    if depth == 0 or not draw(st.integers(0, 3)):
        return draw(st.sampled_from([*SYMBOLS, sympy.Integer(draw(st.integers(-9, 9)))]))
    inner = draw(expressions(depth - 1))
    number = sympy.Integer(draw(st.integers(1, 8)))
    kind = draw(st.sampled_from(("add", "mul", "div", "mod")))
    if kind == "add":
        return inner + draw(expressions(depth - 1))
    if kind == "mul":
        return inner * number * draw(st.sampled_from((1, -1)))
    if kind == "div":
        return FloorDiv(inner, number)
    return ModularIndexing(inner, number, sympy.Integer(draw(st.integers(1, 8))))


sizes_of_three = st.tuples(st.integers(1, 5), st.integers(1, 5), st.integers(1, 5))


@settings(max_examples=300)
@given(expressions(), sizes_of_three)
def test_simplify_keeps_the_value_at_every_iteration(expr: sympy.Expr, sizes: tuple[int, ...]) -> None:
    simple = simplify(expr, ranges_of(sizes))
    for at in iterations(sizes):
        assert evaluate(simple, at) == evaluate(expr, at), f"{expr} -> {simple} at {at}"


@settings(max_examples=300)
@given(expressions(), sizes_of_three)
def test_what_sympy_takes_for_nonnegative_is(expr: sympy.Expr, sizes: tuple[int, ...]) -> None:
    if expr.is_nonnegative:
        assert all(evaluate(expr, at) >= 0 for at in iterations(sizes)), expr


def test_a_remainder_of_what_is_negative_is_not_and_no_divisor_is_zero() -> None:
    within = ModularIndexing(-P0 - 1, sympy.S.One, SIZE)  # P0 elements from the end
    assert within.is_nonnegative
    assert not (-within - 1).is_nonnegative
    assert index_text(ModularIndexing(-within - 1, sympy.S.One, SIZE)).startswith("remainder_")  # "%" is C's
    rows = sympy.Symbol("u0", integer=True, nonnegative=True)  # there may be none
    assert index_text(FloorDiv(P0, rows)) == "(p0) / at_least(u0, 1)"
    assert index_text(ModularIndexing(P0, sympy.S.One, rows)) == "(p0) % at_least(u0, 1)"
    ranges = ((P0, sympy.S.Zero, SIZE - 1),)
    assert simplify(ModularIndexing(SIZE - P0 - 1, sympy.S.One, SIZE), ranges) == SIZE - P0 - 1
    assert simplify(FloorDiv(SIZE - P0 - 1, SIZE), ranges) == 0


@settings(max_examples=300)
@given(expressions(), sizes_of_three, st.integers(-6, 6))
def test_bounds_hold_at_every_iteration(expr: sympy.Expr, sizes: tuple[int, ...], shift: int) -> None:
    expr = expr * (1 if shift >= 0 else -1) + shift
    found = bounds(expr, ranges_of(sizes))
    if found is not None:
        for at in iterations(sizes):
            assert evaluate(found[0], {}) <= evaluate(expr, at) <= evaluate(found[1], {})


@settings(max_examples=100)
@given(sizes_of_three, st.permutations(range(3)))
def test_position_in_undoes_flat_index(sizes: tuple[int, ...], order: list[int]) -> None:
    stride = [0, 0, 0]
    step = 1
    for dim in reversed(order):
        stride[dim] = step
        step *= sizes[dim]
    size, steps = [*map(sympy.Integer, sizes)], [*map(sympy.Integer, stride)]
    assert is_dense(size, steps)
    index = flat_index(SYMBOLS, steps, sympy.S.Zero)
    position = position_in(index, size, steps, ranges_of(sizes))
    for at in iterations(sizes):
        assert [evaluate(part, at) for part in position] == [at[symbol] for symbol in SYMBOLS]


@pytest.mark.parametrize(
    ("size", "stride", "dense"),
    [
        ((4, 3), (3, 1), True),
        ((4, 3), (1, 4), True),
        ((4, 3), (4, 1), False),  # holes
        ((4, 3), (0, 1), False),  # one element, several positions
        ((1, 3), (77, 1), True),  # the stride of a dim of size 1 does not matter
        ((), (), True),
    ],
)
def test_dense_layouts_have_neither_holes_nor_overlap(
    size: tuple[int, ...], stride: tuple[int, ...], dense: bool
) -> None:
    assert is_dense([*map(sympy.Integer, size)], [*map(sympy.Integer, stride)]) is dense


def test_divisions_by_symbolic_sizes_are_removed_where_a_proof_exists() -> None:
    ranges = ((P0, sympy.S.Zero, SIZE - 1), (P1, sympy.S.Zero, sympy.Integer(7)))
    assert simplify(FloorDiv(8 * P0 + P1, sympy.Integer(8)), ranges) == P0
    assert simplify(ModularIndexing(8 * P0 + P1, sympy.S.One, sympy.Integer(8)), ranges) == P1
    assert simplify(ModularIndexing(P0, sympy.S.One, SIZE), ranges) == P0
    assert simplify(FloorDiv(P0 + P1, SIZE), ranges).has(FloorDiv)  # may have several values


def test_a_division_drops_terms_that_cannot_change_the_quotient() -> None:
    ranges = ((P0, sympy.S.Zero, sympy.Integer(1023)), (P1, sympy.S.Zero, sympy.Integer(127)))
    whole = sympy.Integer(16384)
    assert simplify(FloorDiv(128 * P0 + P1, whole), ranges) == FloorDiv(P0, sympy.Integer(128))
    inner = ModularIndexing(P0, sympy.S.One, sympy.Integer(128))
    assert simplify(ModularIndexing(128 * P0 + P1, sympy.S.One, whole), ranges) == 128 * inner + P1


def test_a_division_with_only_one_possible_quotient_becomes_a_constant() -> None:
    ranges = ((P0, sympy.S.Zero, sympy.Integer(3)), (P1, sympy.Integer(16384), sympy.Integer(20479)))
    whole = sympy.Integer(16384)
    assert simplify(ModularIndexing(4096 * P0 + P1, sympy.S.One, whole), ranges) == 4096 * P0 + P1 - whole
    assert simplify(FloorDiv(4096 * P0 + P1, whole), ranges) == 1


def test_quotients_are_exact_or_none() -> None:
    assert exact_quotient(6 * P0, sympy.Integer(3)) == 2 * P0
    assert exact_quotient(6 * P0, sympy.Integer(4)) is None
    assert exact_quotient(SIZE * P0, SIZE) == P0
    assert exact_quotient(P0, SIZE) is None
    assert exact_quotient(6 * SIZE**2 * P0, 3 * SIZE) == 2 * SIZE * P0
    assert exact_quotient(SIZE, SIZE**2) is None
    assert exact_quotient(SIZE * P0 + SIZE, SIZE) == P0 + 1
    assert exact_quotient(sympy.expand((SIZE + 1) ** 2), SIZE + 1) == SIZE + 1


def test_comparisons_need_proof() -> None:
    assert at_most(sympy.S.One, SIZE)
    assert at_most(sympy.S.Zero, SIZE - 1)
    assert not at_most(sympy.Integer(2), SIZE)
    other = sympy.Symbol("s1", integer=True, positive=True)
    assert not at_most(SIZE, other)


def test_substitution_is_simultaneous() -> None:
    assert substitute(P0 + 2 * P1, {P0: P1, P1: P0}) == P1 + 2 * P0


def test_an_index_over_merged_loops_is_split_where_the_inner_size_divides() -> None:
    ranges = ranges_of((32 * 2048, 2048))
    flat = 2048 * P0 + P1
    assert simplify(ModularIndexing(flat, 1, 2048 * 2048), ranges) == 2048 * ModularIndexing(P0, 1, 2048) + P1
    assert simplify(FloorDiv(flat, 2048 * 2048), ranges) == FloorDiv(P0, 2048)


def test_quotient_and_remainder_of_one_division_recombine() -> None:
    ranges = ranges_of((64, 7))
    assert simplify(64 * FloorDiv(P0 * 7 + P1, 64) + ModularIndexing(P0 * 7 + P1, 1, 64), ranges) == 7 * P0 + P1
    assert simplify(8 * FloorDiv(P0, 24) + ModularIndexing(P0, 3, 8), ranges) == FloorDiv(P0, 3)
