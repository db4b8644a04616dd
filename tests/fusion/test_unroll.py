"""Short reductions are unrolled and compute the same; reductions that need their loop keep it."""

from __future__ import annotations

import pytest
import sympy
import torch
from hypothesis import given, settings

from overlapc.fusion import fuse_ops
from overlapc.fusion.unroll import MOST_UNROLLED, unrolled
from overlapc.ir.body import Body, Loop, Reduce, op
from overlapc.ir.ops import Loops
from tests.fusion.programs import capture
from tests.ir.bodies import P, R, bodies, buffers_for, loops_of, put, x
from tests.ir.interpret import run_body, run_ops


@settings(max_examples=200)
@given(bodies())
def test_an_unrolled_body_computes_the_same(body: Body) -> None:
    other = unrolled(body)
    one, two = buffers_for(body), buffers_for(body)
    run_body(body, one)
    run_body(other, two)
    for name in one:
        assert torch.equal(one[name], two[name]), f"{body}\n{other}"


def total(kind: str, length: sympy.Expr | int, dtype: torch.dtype = torch.float32) -> Body:
    value = Reduce(kind, x("a", 9 * P[0] + R[0]), dtype)
    return Body(loops_of("p", (3,)), (Loop(R[0], sympy.sympify(length)),), (put("y", P[0], value),))


@pytest.mark.parametrize("kind", ["sum", "prod", "max", "min"])
def test_reductions_over_few_elements_are_unrolled(kind: str) -> None:
    assert unrolled(total(kind, MOST_UNROLLED)).reduction == ()
    assert len(unrolled(total(kind, 4)).loads()) == 4


def test_reductions_of_reductions_are_unrolled() -> None:
    element = x("a", 4 * P[0] + R[0])
    spread = Reduce("sum", op("sub", element, Reduce("max", element, torch.float32)), torch.float32)
    body = Body(loops_of("p", (3,)), loops_of("r", (4,)), (put("y", P[0], spread),))
    other = unrolled(body)
    assert other.reduction == ()
    one, two = buffers_for(body), buffers_for(body)
    run_body(body, one)
    run_body(other, two)
    assert torch.equal(one["y"], two["y"])


def test_long_symbolic_empty_and_index_reductions_are_not_unrolled() -> None:
    size = sympy.Symbol("s0", integer=True, positive=True)
    every = Body(
        loops_of("p", (3,)),
        loops_of("r", (2,)),
        (put("y", 2 * P[0] + R[0], Reduce("sum", x("a", R[0]), torch.float32)),),
    )
    for body in (
        total("sum", MOST_UNROLLED + 1),
        total("sum", size),
        total("sum", 0),
        total("argmax", 4, torch.int64),
        every,
    ):
        assert unrolled(body) is body


def test_the_gradient_of_shared_heads_fuses_with_its_reader() -> None:
    def function(a: torch.Tensor) -> list[torch.Tensor]:
        return [a.view(2, 4, 8).sum(1).t().contiguous() * 2]

    made = capture(function, torch.rand(8, 8))
    ops, _ = fuse_ops(made)
    assert sum(isinstance(each, Loops) for each in ops) == 1
    a = torch.rand(8, 8)
    torch.testing.assert_close(run_ops(ops, made, [a]), function(a))
