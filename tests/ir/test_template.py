"""Which kernels have the same template, so that they can share a launch."""

from __future__ import annotations

import sympy
import torch

from overlapc.ir.body import Body, Load, Reduce, Store, op
from overlapc.ir.template import SIZE, once_for_all_buffers, template_of, with_numbered_buffers
from tests.ir.bodies import P, R, loops_of, put, x


def scaled(out: str, read: str, elements: int) -> Body:
    return Body(loops_of("p", (elements,)), (), (put(out, P[0], op("mul", x(read, P[0]), x("scale", 0))),))


def test_buffers_and_the_one_size_are_abstracted() -> None:
    small, large = template_of(scaled("y", "a", 8)), template_of(scaled("z", "b", 4096))
    assert small.body == large.body
    assert small.body.loops[0].size == SIZE
    assert (small.size, large.size) == (8, 4096)
    assert small.buffers == ("a", "scale", "y")
    assert large.buffers == ("b", "scale", "z")


def test_the_size_of_a_single_reduction_loop_is_abstracted() -> None:
    def norm(elements: int) -> Body:
        value = Reduce("sum", x("a", R[0]), torch.float32)
        return Body((), loops_of("r", (elements,)), (put("y", 0, value),))

    assert template_of(norm(3)).body == template_of(norm(30)).body


def test_sizes_of_several_loops_are_part_of_the_template() -> None:
    def transposed(rows: int) -> Body:
        return Body(loops_of("p", (rows, 4)), (), (put("y", 4 * P[0] + P[1], x("a", rows * P[1] + P[0])),))

    assert template_of(transposed(3)).body != template_of(transposed(5)).body
    assert template_of(transposed(3)).size is None


def test_a_symbolic_size_is_not_abstracted() -> None:
    size = sympy.Symbol("s0", integer=True, positive=True)
    body = scaled("y", "a", 8)
    symbolic = Body((type(body.loops[0])(P[0], size),), (), body.stores)
    assert template_of(symbolic).size is None
    assert template_of(symbolic).body.size_symbols() == [size]


def test_dtypes_and_a_buffer_read_twice_are_part_of_the_template() -> None:
    low = Body(loops_of("p", (8,)), (), (Store("y", P[0], x("a", P[0]), torch.bfloat16),))
    plain = Body(loops_of("p", (8,)), (), (put("y", P[0], x("a", P[0])),))
    assert template_of(low).body != template_of(plain).body
    both = [op("add", x("a", P[0]), Load(name, P[0] + 1, torch.float32)) for name in ("a", "b")]
    kinds = [template_of(Body(loops_of("p", (8,)), (), (put("y", P[0], value),))) for value in both]
    assert kinds[0].body != kinds[1].body


def test_a_function_of_bodies_runs_once_for_all_buffers():
    calls: list[tuple[Body, ...]] = []

    @once_for_all_buffers
    def first_stores_then_second(first: Body, second: Body) -> Body | None:
        calls.append((first, second))
        shares = first.loads()[0].buffer == second.loads()[0].buffer
        return Body(first.loops, (), first.stores + second.stores) if shares else None

    def both(first: Body, second: Body) -> Body:
        return Body(first.loops, (), first.stores + second.stores)

    one, other = scaled("y", "a", 8), scaled("z", "a", 8)
    assert first_stores_then_second(one, other) == both(one, other)
    assert len(calls) == 1
    later, another = scaled("y_1", "a_1", 8), scaled("z_1", "a_1", 8)
    made = first_stores_then_second(later, another)
    assert made == both(later, another)
    assert len(calls) == 1
    assert with_numbered_buffers(made) == with_numbered_buffers(both(later, another))
    assert first_stores_then_second(later, scaled("z_1", "c", 8)) is None  # they read different buffers
    assert first_stores_then_second(later, scaled("z_1", "a_1", 9)) == both(later, scaled("z_1", "a_1", 9))
    assert len(calls) == 3


def test_a_body_that_is_returned_unchanged_is_the_same_object():
    second_of = once_for_all_buffers(lambda first, second: second)
    for first, second in ((scaled("y", "a", 8), scaled("z", "y", 8)), (scaled("t", "b", 8), scaled("u", "t", 8))):
        assert second_of(first, second) is second
