"""A loop cut where a condition changes computes the same, reads elements once, and fuses with kernels over one part."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import sympy
import torch
from hypothesis import given, settings
from torch import Tensor

from overlapc.codegen.triton import TritonGenerator
from overlapc.fusion import fuse_ops
from overlapc.fusion.cuts import MOST_PARTS, SHORTEST_PART, cut
from overlapc.fusion.work import work_of
from overlapc.ir.body import Body, Constant, Index, Load, Loop, Op, Reduce, Store, Value, op
from overlapc.ir.ops import Loops
from tests.codegen.cubins import compile_source
from tests.codegen.triton_cases import rope
from tests.fusion.programs import capture
from tests.ir.bodies import P, R, bodies, buffers_for, loops_of, put, x
from tests.ir.interpret import run_body, run_ops

HALF = 2 * SHORTEST_PART
WIDTH = 2 * HALF
F32 = torch.float32


def same(body: Body, other: Body, exact: bool = True) -> None:
    one, two = buffers_for(body), buffers_for(body)
    run_body(body, one)
    run_body(other, two)
    for name in one:
        if exact:
            assert torch.equal(one[name], two[name]), f"{body}\n{other}"
        else:
            torch.testing.assert_close(one[name], two[name])


@settings(max_examples=100)
@given(bodies())
def test_a_cut_body_computes_the_same(body: Body) -> None:
    same(body, cut(body), exact=not body.reduction)


def below(position: sympy.Symbol, border: int) -> Op:
    return op("lt", Index(position), Constant(border, torch.int64))


def masked(buffer: str, index: sympy.Expr, mask: Value) -> Load:
    return Load(buffer, index, F32, mask)


def joined(position: sympy.Symbol, border: int, row: sympy.Expr | int = 0) -> Value:
    """Return the value that `cat` of two tensors lowers to."""
    low = below(position, border)
    high = op("ge", *low.args)
    return op("where", low, masked("a", row + position, low), masked("b", row + position - border, high))


def stored(value: Value, size: sympy.Expr | int = WIDTH) -> Body:
    return Body((*loops_of("p", (3,)), Loop(P[1], sympy.sympify(size))), (), (put("y", size * P[0] + P[1], value),))


@pytest.mark.parametrize(("border", "parts"), [(HALF, 2), (SHORTEST_PART, 4), (3 * SHORTEST_PART, 4)])
def test_every_part_has_its_own_store_and_no_masks(border: int, parts: int) -> None:
    body = stored(joined(P[1], border, WIDTH * P[0]))
    other = cut(body)
    assert len(other.stores) == parts
    assert other.loops[-1].size == WIDTH // parts
    assert all(load.mask is None for load in other.loads())
    same(body, other)


def test_a_condition_on_a_row_of_heads_cuts_the_loop_of_heads() -> None:
    heads, width = 6 * SHORTEST_PART, 8
    first = op("lt", Index(width * P[0] + P[1]), Constant(4 * SHORTEST_PART * width, torch.int64))
    at = width * P[0] + P[1]
    value = op("where", first, masked("a", at, first), x("b", at))
    body = Body(loops_of("p", (heads, width)), (), (put("y", at, value),))
    assert len(cut(body).stores) == 3
    same(body, cut(body))


def test_alternating_elements_are_stored_by_one_iteration() -> None:
    """The sum of the gradients of `x[..., ::2]` and `x[..., 1::2]`: every element belongs to exactly one of them."""
    first, second = op("eq", Index(P[1]), Index(sympy.S.Zero)), op("eq", Index(P[1]), Index(sympy.S.One))
    parts = [masked(name, P[0], mask) for name, mask in (("a", first), ("b", second))]
    body = Body(loops_of("p", (WIDTH, 2)), (), (put("y", 2 * P[0] + P[1], op("add", *parts)),))
    other = cut(body)
    assert [store.index for store in other.stores] == [2 * P[0], 2 * P[0] + 1]
    assert len(other.loops) == 1
    assert all(load.mask is None for load in other.loads())
    same(body, other)


def test_an_iteration_of_a_cut_reduction_reads_one_element_of_each_part() -> None:
    at = WIDTH * P[0] + R[0]
    low = below(R[0], HALF)
    turned = op("where", low, op("neg", masked("a", at + HALF, low)), masked("a", at - HALF, op("ge", *low.args)))
    total = Reduce("sum", op("mul", x("a", at), x("a", at)), F32)
    body = Body(
        loops_of("p", (3,)), loops_of("r", (WIDTH,)), (put("s", P[0], total), put("y", at, op("mul", turned, total)))
    )
    other = cut(body)
    assert other.reduction_numel() == HALF
    assert [store.buffer for store in other.stores] == ["s", "y", "y"]
    assert len(other.loads()) == 2  # of 3 before: the row, and each of its halves again
    same(body, other, exact=False)


def test_uneven_short_many_symbolic_and_order_dependent_parts_are_not_cut() -> None:
    size = sympy.Symbol("s0", integer=True, positive=True)
    between = op("lt", Index(P[0]), Index(P[1]))
    position = Reduce("argmax", joined(R[0], HALF, WIDTH * P[0]), torch.int64)
    for body in (
        stored(joined(P[1], HALF - 1)),
        stored(joined(P[1], SHORTEST_PART // 2)),
        stored(joined(P[1], SHORTEST_PART), size=2 * MOST_PARTS * SHORTEST_PART),
        stored(joined(P[1], HALF), size=size),
        stored(op("where", between, x("a", P[1]), x("b", P[1]))),
        Body(loops_of("p", (3,)), loops_of("r", (WIDTH,)), (Store("y", P[0], position, torch.int64),)),
    ):
        assert cut(body) is body


def packed(product: Tensor, gradient: Tensor) -> list[Tensor]:
    """Return the gradient of a gated activation whose gate and value are halves of one product."""
    gate, up = product.chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    halves = (gradient * up * sigmoid * (1 + gate * (1 - sigmoid)), gradient * gate * sigmoid)
    return [torch.cat(halves, -1)]


def turned(query: Tensor, sine: Tensor) -> list[Tensor]:
    """Return the gradient of a rotary embedding that swaps the halves of its input by slices."""
    product = query * sine
    half = product.shape[-1] // 2
    first, second = product[..., half:], -product[..., :half]
    zeros = torch.zeros_like(product)
    return [torch.slice_scatter(zeros, first, -1, 0, half) + torch.slice_scatter(zeros, second, -1, half)]


@pytest.mark.parametrize(
    ("function", "shapes", "elements"),
    [(packed, ((6, WIDTH), (6, HALF)), 6 * (2 * WIDTH + HALF)), (turned, ((6, WIDTH), (6, WIDTH)), 6 * 3 * WIDTH)],
)
def test_a_graph_with_joined_halves_is_one_kernel_that_moves_every_element_once(
    function: Callable[..., list[Tensor]], shapes: tuple[tuple[int, int], ...], elements: int
) -> None:
    inputs = [torch.randn(shape) for shape in shapes]
    made = capture(function, *inputs)
    ops, _ = fuse_ops(made)
    (kernel,) = (each for each in ops if isinstance(each, Loops))
    work = work_of(kernel, made)
    assert work.read_bytes + work.write_bytes == 4 * elements
    torch.testing.assert_close(run_ops(ops, made, inputs), function(*inputs))


def test_a_rotary_embedding_loads_whole_vectors_once(tmp_path: Path) -> None:
    body = cut(rope(2048, 32, 128).body)
    (compiled,) = compile_source(TritonGenerator().generate(body, "rope"), tmp_path)
    loads = re.findall(r"ld\.global[\w.:]*", compiled.asm["ptx"])
    assert loads
    assert all(".v4." in load for load in loads)
    reads = [load for load in body.loads() if load.buffer == "x"]
    assert len(reads) == 2  # one for each of the two elements of an iteration
