"""Random programs compute the same without fusion, fused by score, fused in random order, and compiled."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from overlapc.fusion import fuse_ops
from tests.fusion.programs import STEPS, Step, capture, inputs, program, steps
from tests.ir.interpret import run_ops


def assert_equal(got: list[Any], wanted: list[Tensor], what: str) -> None:
    for at, (one, other) in enumerate(zip(got, wanted, strict=True)):
        assert one.dtype == other.dtype, what
        assert torch.equal(one, other), f"{what}: result {at} is {one}, eager says {other}"


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(steps(), st.integers(0, 2**16))
def test_any_fusion_gives_eagers_results(recipe: list[Step], seed: int) -> None:
    run = program(recipe)
    eager = inputs()
    wanted = run(*eager)
    graph = capture(run, *inputs())
    for what, options in (
        ("off", {"enabled": False}),
        ("by score", {}),
        (f"order {seed}", {"seed": seed}),
    ):
        ops, _ = fuse_ops(graph, **options)  # type: ignore[arg-type]
        arguments = inputs()
        got = run_ops(ops, graph, arguments)
        assert_equal(got[-len(wanted) :], wanted, f"fusion {what}")
        assert_equal(arguments, eager, f"arguments after fusion {what}")


def drawn(seed: int, count: int) -> list[Step]:
    generator = random.Random(seed)
    names = sorted(STEPS)
    return [
        (generator.choice(names), generator.randrange(50), generator.randrange(8), generator.randrange(50))
        for _ in range(count)
    ]


@pytest.mark.parametrize(("seed", "fusion"), [(1, True), (1, False), (2, True), (3, True)])
def test_compiled_programs_give_eagers_results(seed: int, fusion: bool) -> None:
    run = program(drawn(seed, 16))
    eager, arguments = inputs(), inputs()
    wanted = run(*eager)
    torch._dynamo.reset()
    with torch.no_grad():
        got = torch.compile(run, backend="overlapc", options={"fusion": fusion}, dynamic=False)(*arguments)
    assert_equal(got, wanted, "compiled")
    assert_equal(arguments, eager, "arguments")
