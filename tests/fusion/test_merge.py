"""Two merged bodies store the same as one after the other, or the merge is refused with a reason."""

from __future__ import annotations

import math

import sympy
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from overlapc.fusion.merge import Refusal, merge, refine, same_space, without_stores
from overlapc.ir.body import Body, Constant, Index, Load, Op, Reduce, Store, op
from overlapc.ir.indexing import loop_symbol
from overlapc.ir.rewriting import canonical
from tests.ir.bodies import P, bodies, buffers_for, flat, loops_of, put, x
from tests.ir.interpret import run_body


def assert_does_both(first: Body, second: Body, merged: Body) -> None:
    apart = buffers_for(first, second)
    together = {name: memory.clone() for name, memory in apart.items()}
    run_body(first, apart)
    run_body(second, apart)
    run_body(merged, together)
    for name, memory in apart.items():
        assert torch.equal(memory, together[name]), f"{name} differs\n{first}\n{second}\n{merged}"


def merged_of(first: Body, second: Body) -> Body:
    merged = merge(first, second)
    assert not isinstance(merged, Refusal), merged.reason
    assert_does_both(first, second, merged)
    assert_does_both(first, second, canonical(merged))
    return merged


def reason(first: Body, second: Body) -> str:
    merged = merge(first, second)
    assert isinstance(merged, Refusal)
    return merged.reason


def elementwise(out: str, read: str, *sizes: int) -> Body:
    loops = loops_of("p", sizes)
    return Body(loops, (), (put(out, flat(loops), op("neg", x(read, flat(loops)))),))


def row_sums(out: str, read: str, rows: int, length: int) -> Body:
    loops, inner = loops_of("p", (rows,)), loops_of("r", (length,))
    total = Reduce("sum", x(read, flat((*loops, *inner))), torch.float32)
    return Body(loops, inner, (put(out, P[0], total),))


@settings(max_examples=300)
@given(bodies(out="y"), bodies(out="z", inputs=("a", "y")))
def test_merged_bodies_compute_the_same(first: Body, second: Body) -> None:
    for one, other in ((first, second), (canonical(first), canonical(second))):
        merged = merge(one, other)
        if not isinstance(merged, Refusal):
            assert same_space(one, other)
            assert_does_both(one, other, merged)
            assert not {load.buffer for load in merged.loads()} & {"y"}


@settings(max_examples=200)
@given(st.lists(st.integers(1, 6), max_size=4), st.lists(st.integers(1, 6), max_size=4))
def test_refined_sizes_multiply_back_to_both_nests(a: list[int], b: list[int]) -> None:
    refined = refine([*map(sympy.Integer, a)], [*map(sympy.Integer, b)])
    if refined is None:
        return
    for nest, parts in zip((a, b), refined.parts, strict=True):
        assert [math.prod(int(refined.sizes[at]) for at in part) for part in parts] == nest
        used = [at for part in parts for at in part]
        assert used == list(range(len(refined.sizes)))


def test_loops_of_equal_total_size_are_split_into_common_loops() -> None:
    refined = refine([sympy.Integer(12), sympy.Integer(4)], [sympy.Integer(6), sympy.Integer(8)])
    assert refined is not None
    assert refined.sizes == (6, 2, 4)
    size = sympy.Symbol("s0", integer=True, positive=True)
    symbolic = refine([size * 4], [size, sympy.Integer(4)])
    assert symbolic is not None
    assert symbolic.sizes == (size, 4)
    assert refine([size], [sympy.Integer(4)]) is None
    assert refine([sympy.Integer(6)], [sympy.Integer(4)]) is None


def test_a_merged_reader_uses_the_value_instead_of_loading_it() -> None:
    merged = merged_of(elementwise("y", "a", 12), elementwise("z", "y", 3, 4))
    assert {load.buffer for load in merged.loads()} == {"a"}
    assert [store.buffer for store in merged.stores] == ["y", "z"]


def test_readers_of_one_buffer_share_the_load() -> None:
    merged = merged_of(elementwise("y", "a", 12), elementwise("z", "a", 12))
    assert len(merged.loads()) == 1


def test_element_wise_bodies_merge_with_a_reduction_over_rows() -> None:
    for one, other in (
        (row_sums("y", "a", 4, 6), elementwise("z", "y", 4)),  # over the result of the reduction
        (row_sums("y", "a", 4, 6), elementwise("z", "a", 24)),  # over the elements that it reduces
        (elementwise("z", "a", 24), row_sums("y", "z", 4, 6)),  # the producer of these elements
    ):
        assert merged_of(one, other).reduction == loops_of("r", (6,))


def test_a_merged_reduction_over_one_element_stays_a_reduction() -> None:
    """Without its loop, generators could not tell where to compute the reduction."""
    for other in (elementwise("z", "b", 6), elementwise("z", "b", 2, 3), row_sums("z", "b", 6, 1)):
        for merged in (merged_of(row_sums("y", "a", 6, 1), other), merged_of(other, row_sums("y", "a", 6, 1))):
            assert merged.reduction_numel() == 1
            assert merged.reduction


def test_two_reductions_over_the_same_elements_share_one_pass() -> None:
    merged = merged_of(row_sums("y", "a", 4, 6), row_sums("z", "a", 4, 6))
    assert len(merged.loads()) == 1


def test_a_read_at_another_index_is_refused() -> None:
    loops = loops_of("p", (3, 4))
    transposed = Body(loops, (), (put("z", flat(loops), x("y", P[0] + 3 * P[1])),))
    assert reason(elementwise("y", "a", 12), transposed) == "y is written at [4*p0 + p1] but read at [p0 + 3*p1]"


def test_bodies_with_different_ranges_are_refused() -> None:
    assert reason(elementwise("y", "a", 12), elementwise("z", "a", 10)) == "their loops run over different ranges"
    assert "different ranges" in reason(row_sums("y", "a", 4, 6), row_sums("z", "a", 6, 4))
    assert "neither the rows nor the elements" in reason(row_sums("y", "a", 4, 6), elementwise("z", "a", 5))
    assert not same_space(elementwise("y", "a", 12), elementwise("z", "a", 10))


def test_atomic_scattered_and_masked_writes_are_not_read_in_the_same_kernel() -> None:
    where = loop_symbol("i", 0)
    row = Load("rows", P[0], torch.int64)
    mask = op("lt", Index(P[0]), Constant(3, torch.int64))
    loops = loops_of("p", (4,))
    reader = elementwise("z", "y", 4)
    one = Constant(1.0, torch.float32)
    for store in (
        Store("y", P[0], one, torch.float32, "add"),
        Store("y", where, one, torch.float32, "set", None, ((where, row),)),
        Store("y", P[0], one, torch.float32, "set", mask),
    ):
        assert "y is read or written through indices from memory" in reason(Body(loops, (), (store,)), reader)
    gathers = Body(loops, (), (put("z", P[0], Load("y", where, torch.float32, None, ((where, row),))),))
    assert "through indices" in reason(elementwise("y", "a", 4), gathers)


def test_a_merged_masked_read_is_zero_outside_its_mask() -> None:
    mask = op("lt", Index(P[0]), Constant(3, torch.int64))
    loops = loops_of("p", (4,))
    reader = Body(loops, (), (put("z", P[0], Load("y", P[0], torch.float32, mask)),))
    merged_of(elementwise("y", "a", 4), reader)


def test_a_store_to_a_buffer_that_the_first_body_reads_is_refused() -> None:
    assert reason(elementwise("y", "a", 4), elementwise("a", "b", 4)) == (
        "a is read by the first and overwritten by the second"
    )


def test_stores_that_are_not_read_are_dropped_with_their_values() -> None:
    loops = loops_of("p", (12,))
    products = Body(loops, (), (put("z", P[0], op("mul", x("y", P[0]), x("a", P[0]))),))
    powers = Body(loops, (), (put("w", P[0], op("exp", x("y", P[0]))),))
    left = without_stores(merged_of(merged_of(elementwise("y", "a", 12), products), powers), {"y", "w"})
    assert [store.buffer for store in left.stores] == ["z"]
    assert [value.name for value in left.values() if isinstance(value, Op)] == ["neg", "mul"]
