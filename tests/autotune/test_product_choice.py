"""`matmul="autotune"`: library calls and generated kernels are measured, cached and compared."""

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
    """Run kernels in Triton's interpreter on CPU tensors, and forget preferred tilings after the test."""
    monkeypatch.setattr(products, "_preferred", {})
    with interpreting():
        yield


def test_library_and_generated_kernel_are_measured_and_cached(interpreter: None, tmp_path: Path):
    cpu = torch.device("cpu")
    first = ProductTimes(cpu, tmp_path)([SMALL, BATCH, SMALL])
    assert set(first) == {f"{each} {whose}" for each in (SMALL, BATCH) for whose in ("library", "ours")}
    assert all(0 < ns < NEVER for ns in first.values())
    assert ProductTimes(cpu, tmp_path)([SMALL, BATCH]) == first  # from the cache


def test_trials_use_concrete_sizes_while_a_graph_is_compiled(interpreter: None, tmp_path: Path):
    """The fake mode of that graph would make sizes symbolic, and a trial's kernel has no values for symbols."""
    times = ProductTimes(torch.device("cpu"), tmp_path)
    compiling = TracingContext(FakeTensorMode(shape_env=ShapeEnv()))
    with tracing(compiling):
        found = times([SMALL])
    assert 0 < found[f"{SMALL} ours"] < NEVER


def test_the_preferred_tiling_is_used_for_products_of_the_same_sizes(interpreter: None, tmp_path: Path):
    case = plain("wide", 4096, 4096, 64, f32)
    slowest = products.candidates(case.body, {})[-1]
    assert products.choose(case.body, {}) != slowest
    products.prefer(case.body, {}, slowest)
    assert products.choose(case.body, {}) == slowest


def test_the_generated_kernel_is_chosen_only_if_it_is_faster():
    wins = choice({f"{SMALL} ours": 2.0, f"{SMALL} library": 3.0, f"{BATCH} ours": 3.0, f"{BATCH} library": 3.0})
    assert wins(SMALL)
    assert not wins(BATCH)
