"""A simplified body computes the same numbers with fewer values."""

from __future__ import annotations

import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.fusion.simplify import simplified
from overlapc.ir.body import Body, Cast, Constant, Index, Load, Op, Reduce, Store, Value, op
from overlapc.ir.conversions import numbers_last, rounded_once
from tests.ir.bodies import P, R, loops_of, put, x
from tests.ir.interpret import run_body


def zero() -> Constant:
    return Constant(0.0, torch.float32)


def position(expr: sympy.Expr) -> Index:
    return Index(expr, torch.int64)


def number(value: int) -> Constant:
    return Constant(value, torch.int64)


def wheres(body: Body) -> int:
    return sum(isinstance(value, Op) and value.name == "where" for value in body.values())


def results(body: Body, **buffers: torch.Tensor) -> torch.Tensor:
    y = torch.full((64,), 7.0)
    run_body(body, {**buffers, "y": y})
    return y


def joined(uses_twice: bool) -> Body:
    """Return a body of cat((-a * s, exp(a))) whose parts are each masked and wrapped in a `where`."""
    first, second = op("lt", position(P[0]), number(4)), op("ge", position(P[0]), number(4))
    low = op("mul", Load("a", P[0], torch.float32, first), op("where", first, x("s", 0), zero()))
    high = op("where", second, op("exp", Load("a", P[0] - 4, torch.float32, second)), zero())
    value: Value = op("where", first, op("where", first, op("neg", low), zero()), high)
    stores = [put("y", P[0], value)]
    if uses_twice:
        stores.append(put("y", P[0] + 8, low))
    return Body(loops_of("p", (8,)), (), tuple(stores))


def test_a_branch_does_not_test_the_same_condition_again() -> None:
    body = joined(uses_twice=False)
    short = simplified(body)
    assert (wheres(body), wheres(short)) == (4, 1)
    a, s = torch.randn(8), torch.randn(1)
    torch.testing.assert_close(results(short, a=a, s=s), results(body, a=a, s=s))


def test_a_value_with_a_second_reader_is_not_computed_twice() -> None:
    body = joined(uses_twice=True)
    short = simplified(body)
    assert sum(isinstance(value, Op) and value.name == "mul" for value in short.values()) == 1
    a, s = torch.randn(8), torch.randn(1)
    torch.testing.assert_close(results(short, a=a, s=s), results(body, a=a, s=s))


def picking(target_of_row: Value, factor: Value | None = None, ignored: int | None = None) -> Body:
    """Return a body for the gradient of log-softmax and of picking one element per row, which sums one-hot rows."""
    chosen = op("eq", position(R[0]), target_of_row)
    if ignored is not None:
        chosen = op("bitwise_and", chosen, op("ne", target_of_row, number(ignored)))
    there = op("where", chosen, Constant(-1.0, torch.float32), zero())
    grad = there if factor is None else op("mul", there, factor)
    total = Reduce("sum", grad, torch.float32)
    value = op("sub", grad, op("mul", x("a", 8 * P[0] + R[0]), total))
    return Body(loops_of("p", (4,)), loops_of("r", (8,)), (put("y", 8 * P[0] + R[0], value),))


@given(st.lists(st.integers(-2, 9), min_size=4, max_size=4), st.booleans(), st.sampled_from((None, -2, 5)))
@settings(max_examples=25)
def test_the_sum_of_a_row_with_one_nonzero_element_needs_no_reduction(
    targets: list[int], scaled: bool, ignored: int | None
) -> None:
    body = picking(Load("t", P[0], torch.int64), x("s", P[0]) if scaled else None, ignored)
    short = simplified(body)
    assert not short.reduction
    assert len(short.loops) in (1, 2)
    factors = torch.tensor([0.5, float("inf"), float("nan"), -2.0])  # 0 * inf, in the row's other elements, is NaN
    buffers = {"a": torch.randn(32), "t": torch.tensor(targets), "s": factors}
    torch.testing.assert_close(results(short, **buffers), results(body, **buffers), equal_nan=True)


def test_sums_of_several_elements_stay() -> None:
    of_row, of_element = Load("t", P[0], torch.int64), Load("t", 8 * P[0] + R[0], torch.int64)
    for body in (picking(of_element), picking(of_element, ignored=5)):
        assert simplified(body) is body
    both = op("logical_and", op("eq", position(R[0]), of_row), op("eq", of_element, number(3)))
    partly = Reduce("sum", op("where", both, Constant(-1.0, torch.float32), zero()), torch.float32)
    body = Body(loops_of("p", (4,)), loops_of("r", (8,)), (put("y", P[0], partly),))
    assert simplified(body) is body


def test_a_store_per_row_keeps_the_reduction() -> None:
    body = picking(Load("t", P[0], torch.int64))
    total = next(value for value in body.values() if isinstance(value, Reduce))
    both = Body(body.loops, body.reduction, (*body.stores, Store("z", P[0], total, torch.float32)))
    assert simplified(both).reduction


def test_an_operation_common_to_all_branches_is_done_once() -> None:
    first, second = op("lt", position(P[0]), number(3)), op("lt", position(P[0]), number(6))
    parts = [Cast(Load(name, P[0], torch.float32), torch.bfloat16) for name in "abc"]
    joined = op("where", first, parts[0], op("where", second, parts[1], parts[2]))
    body = Body(loops_of("p", (8,)), (), (put("y", P[0], joined),))
    short = simplified(body)
    assert sum(isinstance(value, Cast) for value in short.values()) == 1
    buffers = {name: torch.randn(8) for name in "abc"}
    assert torch.equal(results(short, **buffers), results(body, **buffers))


def test_products_with_a_constant_on_either_side_are_one_value() -> None:
    two = Constant(2.0, torch.float32)
    values = op("mul", two, x("a", P[0])), op("mul", x("a", P[0]), two)
    body = Body(loops_of("p", (8,)), (), tuple(put("y", P[0] + 8 * at, value) for at, value in enumerate(values)))
    assert [value.name for value in numbers_last(body).values() if isinstance(value, Op)] == ["mul"]


def test_a_value_is_not_rounded_before_a_store_that_rounds_it() -> None:
    rounded = Cast(op("exp", x("a", P[0])), torch.bfloat16)
    body = Body(loops_of("p", (8,)), (), (Store("y", P[0], rounded, torch.bfloat16), put("z", P[0], rounded)))
    assert [type(store.value) for store in rounded_once(body).stores] == [Op, Cast]


def test_an_element_that_is_loaded_anyway_is_not_loaded_again_with_a_mask() -> None:
    first = op("lt", position(P[0]), number(4))
    read, masked = Load("a", P[0], torch.float32), Load("a", P[0], torch.float32, first)
    value = op("add", read, op("where", first, op("mul", masked, masked), zero()))
    body = Body(loops_of("p", (8,)), (), (put("y", P[0], value), put("y", P[0] + 8, masked)))
    short = simplified(body)
    assert short.loads() == [read]
    a = torch.randn(8)
    torch.testing.assert_close(results(short, a=a), results(body, a=a))
    assert not results(short, a=a)[12:16].any()
