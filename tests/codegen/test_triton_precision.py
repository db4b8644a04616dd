"""Only values that are rounded to low precision before they are stored or compared may be approximate."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import triton

from overlapc.codegen.triton import TritonGenerator
from overlapc.ir.body import Body, Load, Op, Reduce, Store, Value, op
from overlapc.lowering.precision import coarse_values, coarsened
from tests.codegen.terms import bf16, f32, loop, number, p0, r0

FUNCTIONS = {
    "tanh": torch.tanh, "erf": torch.erf, "sigmoid": torch.sigmoid, "exp": torch.exp, "div": lambda x: x / 3.7,
}  # fmt: skip


def names(values: frozenset[Value]) -> set[str]:
    return {value.name for value in values if isinstance(value, Op)}


def test_values_stored_in_float32_or_compared_stay_exact() -> None:
    x = Load("x", p0, f32)
    tanh, exp = op("tanh", x), op("exp", x)
    chosen = op("where", op("lt", exp, number(2.0)), tanh, x)
    low = Body((loop(p0, 8),), (), (Store("y", p0, chosen, bf16),))
    assert names(coarse_values(low)) == {"tanh", "where"}
    both = Body(low.loops, (), (*low.stores, Store("z", p0, tanh, f32)))
    assert names(coarse_values(both)) == {"where"}


def test_operands_of_a_sum_may_be_approximate_if_the_sum_may() -> None:
    exp = op("exp", Load("x", 8 * p0 + r0, f32))
    total = Reduce("sum", exp, f32)
    for dtype, found in ((bf16, {"exp"}), (f32, set())):
        body = Body((loop(p0, 4),), (loop(r0, 8),), (Store("y", p0, total, dtype),))
        assert names(coarse_values(body)) == found


def test_approximate_and_exact_operations_are_different_values() -> None:
    """A kernel with an approximate and an exact operation computes both, each as in any other kernel."""
    x = Load("x", p0, f32)
    (low,) = coarsened(Body((loop(p0, 8),), (), (Store("y", p0, op("tanh", x), bf16),))).stores
    assert isinstance(low.value, Op)
    assert low.value.coarse
    assert low.value is not op("tanh", x)
    text = TritonGenerator().generate(Body((loop(p0, 8),), (), (low, Store("z", p0, op("tanh", x), f32))), "both").text
    assert "ops.coarse_tanh(" in text
    assert "ops.libdevice.tanh(" in text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_approximations_are_exact_to_one_step_of_float16(name: str, tmp_path: Path) -> None:
    near, far = torch.logspace(-30, 1.3, 400, base=10.0), torch.linspace(-12, 12, 624)
    x = torch.cat((far, near, -near))
    arguments = (Load("x", p0, f32), number(3.7)) if name == "div" else (Load("x", p0, f32),)
    body = Body((loop(p0, x.numel()),), (), (Store("y", p0, op(name, *arguments), torch.float16),))
    generator = TritonGenerator()
    source = generator.generate(coarsened(body), name)
    assert f"ops.coarse_{name}(" in source.text
    y = torch.empty(x.numel(), dtype=torch.float16)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        generator.load([source], tmp_path)[source.name](*({"x": x, "y": y}[buffer] for buffer in source.buffers))
    want = FUNCTIONS[name](x.double()).to(torch.float16)
    torch.testing.assert_close(y, want, rtol=2**-10, atol=2**-24)  # one step, also for subnormal numbers


def test_an_approximate_quotient_is_right_for_every_divisor(tmp_path: Path) -> None:
    """Divisors range from the smallest subnormal number to infinity; the reciprocal of some overflows."""
    divisors = torch.cat((torch.logspace(-44.8, 38.5, 200, base=10.0), torch.tensor([0.0, float("inf"), float("nan")])))
    divisors = torch.cat((divisors, -divisors))
    a, b = (each.flatten() for each in torch.meshgrid(divisors, divisors, indexing="ij"))
    body = Body((loop(p0, a.numel()),), (), (Store("y", p0, op("div", Load("a", p0, f32), Load("b", p0, f32)), bf16),))
    generator = TritonGenerator()
    source = generator.generate(coarsened(body), "quotient")
    assert "ops.coarse_div(" in source.text
    y = torch.empty(a.numel(), dtype=bf16)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        generator.load([source], tmp_path)[source.name](*({"a": a, "b": b, "y": y}[name] for name in source.buffers))
    torch.testing.assert_close(y, (a.double() / b.double()).to(bf16), rtol=2**-7, atol=2.0**-132, equal_nan=True)
