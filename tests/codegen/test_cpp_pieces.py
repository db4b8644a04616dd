"""Loops are divided into pieces at the borders of their masks: numbers stay the same, and no masks are left."""

from __future__ import annotations

import pytest
import sympy
import torch

from overlapc.codegen.cpp import CppGenerator
from overlapc.codegen.cpp.pieces import LoopPiece, pieces
from overlapc.ir.body import Body, Constant, Index, Load, Reduce, Store, Value, op
from tests.codegen.cpp_kernels import Kernels
from tests.codegen.terms import loop, p0, p1, r0, s0

F32, BF16, I64 = torch.float32, torch.bfloat16, torch.int64


def number(value: int) -> Constant:
    return Constant(value, I64)


def compared(name: str, left: sympy.Expr, right: sympy.Expr | int) -> Value:
    return op(name, Index(sympy.sympify(left)), Index(sympy.sympify(right)))


def joined(width: int, first: int, dtype: torch.dtype) -> Body:
    """Return a body that concatenates the rows of a and b."""
    low, high = compared("lt", p1, first), compared("ge", p1, first)
    a = Load("a", first * p0 + p1, dtype, mask=low)
    b = Load("b", (width - first) * p0 + p1 - first, dtype, mask=high)
    return Body((loop(p0, 5), loop(p1, width)), (), (Store("y", width * p0 + p1, op("where", low, a, b), dtype),))


def causal(rows: int) -> Body:
    """Return a body for the lower triangle of a matrix and the sums of its rows."""
    seen = compared("le", r0, p0)
    value = op("where", seen, Load("x", rows * p0 + r0, F32), Constant(0.0, F32))
    stores = (Store("y", rows * p0 + r0, value, F32), Store("total", p0, Reduce("sum", value, F32), F32))
    return Body((loop(p0, rows),), (loop(r0, rows),), stores)


def column_sums_of_joined(width: int, first: int, rows: int) -> Body:
    """Return a body for the column sums of a and b concatenated: the border is inside a tile of columns."""
    low, high = compared("lt", p0, first), compared("ge", p0, first)
    a = Load("a", first * r0 + p0, F32, mask=low)
    b = Load("b", (width - first) * r0 + p0 - first, F32, mask=high)
    total = Reduce("sum", op("where", low, a, b), F32)
    return Body((loop(p0, width),), (loop(r0, rows),), (Store("y", p0, total, F32),))


BODIES = {
    "columns": column_sums_of_joined(300, 150, 40),
    "joined_f32": joined(100, 37, F32),
    "joined_bf16": joined(5000, 2000, BF16),  # the border inside a block
    "causal": causal(77),
}


@pytest.mark.parametrize(("name", "first", "second"), [("joined_f32", 37, 63), ("joined_bf16", 2000, 3000)])
def test_concatenated_numbers_keep_their_bits(kernels: Kernels, name: str, first: int, second: int):
    dtype = BF16 if name.endswith("bf16") else F32
    whole = torch.int16 if dtype is BF16 else torch.int32
    a, b = (torch.randint(-30000, 30000, (5, width), dtype=whole).view(dtype) for width in (first, second))
    y = torch.empty(5, first + second, dtype=dtype)
    kernels.run(name, {"a": a, "b": b, "y": y})
    assert torch.equal(y.view(whole), torch.cat([a, b], 1).view(whole))  # NaNs of every kind included


def test_a_border_that_depends_on_an_outer_loop_gives_eagers_numbers(kernels: Kernels):
    x = torch.randn(77, 77)
    y, total = torch.empty(77, 77), torch.empty(77)
    kernels.run("causal", {"x": x, "y": y, "total": total})
    torch.testing.assert_close(y, x.tril())
    torch.testing.assert_close(total, x.tril().sum(1))


def test_a_border_inside_a_tile_of_columns_gives_eagers_numbers(kernels: Kernels):
    a, b, y = torch.randn(40, 150), torch.randn(40, 150), torch.empty(300)
    kernels.run("columns", {"a": a, "b": b, "y": y})
    torch.testing.assert_close(y, torch.cat([a, b], 1).sum(0))


@pytest.mark.parametrize("name", BODIES)
def test_no_condition_is_left(kernels: Kernels, name: str):
    assert "?" not in kernels.whole_vectors(name)


@pytest.mark.parametrize("name", ["lt", "le", "gt", "ge"])
@pytest.mark.parametrize("flipped", [False, True])
@pytest.mark.parametrize("step", [1, -1])
def test_conditions_hold_where_a_piece_says_so(name: str, flipped: bool, step: int):
    left, right = Index(step * p0 + 3), number(step * 20)
    condition = op(name, right, left) if flipped else op(name, left, right)
    found = pieces([left, right, condition], loop(p0, 64))
    assert len(found) == 2
    compare = {"lt": int.__lt__, "le": int.__le__, "gt": int.__gt__, "ge": int.__ge__}[name]
    for piece in found:
        for at in range(int(piece.begin or 0), int(64 if piece.end is None else piece.end)):
            sides = (step * at + 3, step * 20)
            assert piece.facts[condition] == compare(*(sides[::-1] if flipped else sides)), (piece, at)


def test_values_of_combined_conditions_are_known():
    low, high = compared("ge", p0, 32), compared("lt", p0, 64)
    both, neither = op("logical_and", low, high), op("logical_not", op("logical_or", low, high))
    found = pieces([low, high, both, *neither.operands(), neither], loop(p0, 96))
    assert [piece.facts[both] for piece in found] == [False, True, False]
    assert [piece.facts[neither] for piece in found] == [False, False, False]


@pytest.mark.parametrize(
    ("conditions", "size"),
    [
        ([compared("lt", 2 * p0, 40)], 64),  # the index advances by more than one element per step
        ([compared("lt", p0, 5)], 20),  # too short a piece
        ([compared("lt", p0, 40), compared("lt", p0, p1)], 64),  # borders in unknown order
        ([compared("lt", p0, 100)], 64),  # the condition never changes
        ([compared("lt", p0, 32 * at) for at in range(1, 20)], 1000),  # too many pieces
    ],
)
def test_a_loop_stays_whole(conditions: list[Value], size: int):
    assert pieces(conditions, loop(p0, size)) == [LoopPiece()]


def test_a_border_at_a_symbolic_size_leaves_no_mask():
    value = op("where", compared("lt", p0, s0 - 3), number(1), number(2))
    body = Body((loop(p0, s0),), (), (Store("y", p0, value, I64),))
    text = CppGenerator().generate(body, "tail").text
    assert "?" not in text
    assert "at_most(" in text
