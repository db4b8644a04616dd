"""Permuted loops compute the same and allow more fusions; strides decide, and no earlier fusion is lost."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from torch.utils._sympy.functions import FloorDiv

from overlapc.fusion import fuse as fusing
from overlapc.fusion import fuse_ops
from overlapc.fusion.fuse import Fuser
from overlapc.fusion.loop_order import in_order_of, scattered_bytes, split_at_divisions, step
from overlapc.ir.body import Body, Load, op
from overlapc.ir.indexing import ModularIndexing, loop_symbol
from overlapc.ir.ops import Loops
from tests.fusion.programs import Step, capture, inputs, program, steps
from tests.ir.bodies import P, bodies, buffers_for, flat, loops_of, put, x
from tests.ir.interpret import run_body, run_ops


@settings(max_examples=200)
@given(bodies())
def test_a_body_in_another_loop_order_computes_the_same(body: Body) -> None:
    for buffer in ("a", "b", "y"):
        other = in_order_of(body, buffer, int)
        if other is None:
            continue
        one, two = buffers_for(body), buffers_for(body)
        run_body(body, one)
        run_body(other, two)
        assert torch.equal(one["y"], two["y"]), f"{body}\n{other}"
        strides = [
            int(step(load.index, loop)) for load in other.loads() if load.buffer == buffer for loop in other.loops
        ]
        assert strides == sorted(strides, reverse=True)


def transposed(*more: str) -> Body:
    """Return a body for z of shape (4, 3): y transposed, plus buffers with the layout of z."""
    loops = loops_of("p", (4, 3))
    value = x("y", P[0] + 4 * P[1])
    for name in more:
        value = op("add", value, x(name, flat(loops)))
    return Body(loops, (), (put("z", flat(loops), value),))


def test_loops_take_the_order_of_the_strides_of_a_buffer() -> None:
    other = in_order_of(transposed(), "y", int)
    assert other is not None
    assert str(other).splitlines()[0] == "for p0 < 3, for p1 < 4"
    assert in_order_of(transposed(), "nothing", int) is None


def test_loops_stay_if_reads_of_a_buffer_have_no_common_order() -> None:
    loops = loops_of("p", (3, 4))
    straight, turned = x("y", 4 * P[0] + P[1]), x("y", P[0] + 3 * P[1])
    assert in_order_of(Body(loops, (), (put("z", flat(loops), op("add", straight, turned)),)), "y", int) is None
    where, row = loop_symbol("i", 0), Load("rows", P[0], torch.int64)
    looked_up = Load("y", 4 * where + P[1], torch.float32, None, ((where, row),))
    assert in_order_of(Body(loops, (), (put("z", flat(loops), looked_up),)), "y", int) is None


def test_even_divisions_of_an_index_become_loops() -> None:
    loops = loops_of("p", (24,))
    index = FloorDiv(P[0], 6) + 4 * ModularIndexing(P[0], 1, 6)
    body = Body(loops, (), (put("z", P[0], x("y", index)),))
    other = split_at_divisions(body)
    assert str(other).splitlines()[:2] == ["for p0 < 4, for p1 < 6", "  %0 = load y[p0 + 4*p1]: f32"]
    uneven = Body(loops, (), (put("z", P[0], x("y", FloorDiv(P[0], 5))),))
    assert split_at_divisions(uneven) is uneven


def test_bytes_count_as_scattered_unless_the_innermost_step_is_one_or_zero() -> None:
    body = transposed("b")
    assert scattered_bytes(body, {"y": 48, "b": 5, "z": 7}.__getitem__) == 48
    other = in_order_of(body, "y", int)
    assert other is not None
    assert scattered_bytes(other, {"y": 48, "b": 5, "z": 7}.__getitem__) == 12


def both(*more: torch.Tensor) -> tuple[int, list[str]]:
    """Return the number of kernels of `y = exp(a); z = 2 y^T + more; y @ z`, and the reasons of refusals.

    Results are compared with eager.
    """

    def function(a: torch.Tensor, *others: torch.Tensor) -> list[torch.Tensor]:
        y = a.exp()
        z = y.t().contiguous() * 2
        for other in others:
            z = z + other
        return [y @ z, z]

    a = torch.rand(6, 8)
    made = capture(function, a, *more)
    ops, report = fuse_ops(made)
    for got, wanted in zip(run_ops(ops, made, [a, *more]), function(a, *more), strict=True):
        torch.testing.assert_close(got, wanted)
    return sum(isinstance(each, Loops) for each in ops), [each.reason for each in report.refused.values()]


def test_a_transposed_reader_fuses_with_its_producer() -> None:
    assert both() == (1, [])


def test_a_transposed_reader_does_not_fuse_if_more_bytes_are_scattered_than_saved() -> None:
    kernels, refused = both(*(torch.rand(8, 6) for _ in range(3)))
    assert kernels == 2
    assert any("is written at" in reason for reason in refused)


def test_a_group_norm_does_not_fuse_if_its_input_and_result_have_different_orders() -> None:
    """Groups are channel-major in memory, the result is pixel-major: no tile of [groups, elements] suits both."""

    def normed(x: torch.Tensor) -> torch.Tensor:
        groups = x.permute(0, 2, 1).reshape(4, 2, -1)
        mean = groups.mean(-1, keepdim=True)
        return torch.relu(groups - mean)

    made = capture(normed, torch.empty(4, 2048, 64))
    sums, elements = fuse_ops(made)[0]
    assert isinstance(sums, Loops)
    assert isinstance(elements, Loops)
    assert sums.body.reduction
    assert not elements.body.reduction
    assert len(fuse_ops(capture(normed, torch.empty(4, 64, 2048).transpose(1, 2)))[0]) == 1


def test_only_the_last_round_permutes_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fusing, "ROUNDS", fusing.ROUNDS[:-1])
    assert both()[0] == 2


@settings(max_examples=40)
@given(steps(most=20))
def test_permuting_loops_keeps_earlier_fusions(recipe: list[Step]) -> None:
    made = capture(program(recipe), *inputs())
    fuser = Fuser(made.ops, made)
    while fuser.round():
        pass
    together = [set(group.members) for group in fuser.groups]
    fuser.run()
    for members in together:
        assert any(members <= set(group.members) for group in fuser.groups)
