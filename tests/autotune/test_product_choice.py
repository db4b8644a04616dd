"""The contest between library and kernels of ours: what is measured, kept and preferred."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from overlapc.autotune.product_choice import NEVER, ProductTimes, choice
from overlapc.codegen.triton import products
from overlapc.lowering.product import Product
from tests.codegen.interpreted import interpreting
from tests.codegen.product_cases import plain
from tests.codegen.terms import f32

SMALL = Product(1, 16, 24, 16, f32, ((16, 1), (1, 16)))
BATCH = Product(2, 16, 16, 16, f32, ((16, 1), (16, 1)))


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch):
    """Kernels run in Triton's interpreter, on CPU tensors; what is preferred in a test ends with it."""
    monkeypatch.setattr(products, "_preferred", {})
    with interpreting():
        yield


def test_both_are_measured_and_kept(interpreter: None, tmp_path: Path):
    cpu = torch.device("cpu")
    first = ProductTimes(cpu, tmp_path)([SMALL, BATCH, SMALL])
    assert set(first) == {f"{each} {whose}" for each in (SMALL, BATCH) for whose in ("library", "ours")}
    assert all(0 < ns < NEVER for ns in first.values())
    assert ProductTimes(cpu, tmp_path)([SMALL, BATCH]) == first  # read, not measured again


def test_a_graph_that_is_being_compiled_has_no_say_in_sizes(interpreter: None, tmp_path: Path):
    """Its fake mode would make symbols of them, which a trial's kernel has nobody to ask for."""
    times = ProductTimes(torch.device("cpu"), tmp_path)
    compiling = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
    with tracing(compiling):
        found = times([SMALL])
    assert 0 < found[f"{SMALL} ours"] < NEVER


def test_the_fastest_tiling_is_used_for_products_of_those_sizes(interpreter: None, tmp_path: Path):
    case = plain("wide", 4096, 4096, 64, f32)
    slowest = products.candidates(case.body, {})[-1]
    assert products.choose(case.body, {}) != slowest
    products.prefer(case.body, {}, slowest)
    assert products.choose(case.body, {}) == slowest


def test_the_faster_one_is_chosen():
    wins = choice({f"{SMALL} ours": 2.0, f"{SMALL} library": 3.0, f"{BATCH} ours": 3.0, f"{BATCH} library": 3.0})
    assert wins(SMALL)
    assert not wins(BATCH)
