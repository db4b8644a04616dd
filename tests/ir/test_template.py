"""Which kernels have the same template, so that they can share a launch."""

from __future__ import annotations

import sympy
import torch

from overlapc.ir.body import Body, Load, Reduce, Store, op
from overlapc.ir.template import SIZE, template_of
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
