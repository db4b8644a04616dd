"""Environment, order and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import settings

import tests.untimed_guards  # noqa: F401

# Tests must not use results that earlier runs left in the warm-start cache; tests/warm switches it on.
os.environ.setdefault("OVERLAPC_WARM_START", "0")
# Nor depend on the speed and load of this machine, which takes ten seconds to measure for each new cache folder.
if not torch.cuda.is_available():
    os.environ.setdefault("OVERLAPC_PROFILE", "cpu-gloo")

# Most tests do not need the best order of nodes, and searching for it takes half of the compile time: search less.
# tests/passes and tests/schedules test the search.
os.environ.setdefault("OVERLAPC_SEARCH_EFFORT", "100")

# No test of examples fails because this machine is busy: by default an example may take 200 ms.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# Collections of garbage go over all that torch and sympy keep, again and again: a seventh of the CPU time of
# parallel/test_replayed_blocks.py with lowering/test_scatter.py.
gc.set_threshold(50_000, 20, 100)

# Files that take 20 CPU seconds or more, longest first. Workers take files in this order: a worker that starts a long
# file last would keep the other workers waiting.
LONGEST = (
    "parallel/test_parity_steps.py",
    "programs/test_drawn.py",
    "codegen/test_triton_cubin.py",
    "test_parity_ranks.py",
    "planning/test_last_batch_ranks.py",
    "parallel/test_shared_graphs.py",
    "trainers/test_huggingface_ranks.py",
    "trainers/test_torchtitan_ranks.py",
    "parallel/test_replayed_blocks.py",
    "lowering/test_numbers.py",
    "test_copies_ranks.py",
    "compilation/test_folded_blocks.py",
    "codegen/test_triton_kernels.py",
    "parallel/test_fsdp_module_ranks.py",
    "ops/test_sampled.py",
    "lowering/test_symbolic.py",
    "planning/test_repeated_layers.py",
    "planning/test_keep_gathered_ranks.py",
    "launch/test_torchrun.py",
    "codegen/test_same_bits.py",
    "warm/test_warm.py",
    "warm/test_precompile.py",
    "launch/test_demo.py",
    "lowering/test_checks.py",
    "lowering/test_views.py",
    "parallel/test_controls.py",
    "launch/test_plan_model.py",
    "parallel/test_fsdp_graph.py",
    "launch/test_plan_script.py",
    "lowering/test_computed_sizes.py",
    "parallel/test_dtensor_fsdp_ranks.py",
    "schedules/test_corpus.py",
    "lowering/test_control_flow.py",
    "lowering/test_scatter.py",
    "launch/test_calibrate.py",
    "passes/test_bucket_ranks.py",
    "lowering/test_scan.py",
    "test_comparisons.py",
    "test_registration.py",
    "codegen/test_flex_attention.py",
    "examples/test_examples.py",
    "warm/test_warm_ranks.py",
    "codegen/test_triton_tiling.py",
    "runtime/copies/test_pool_ranks.py",
    "launch/test_hosts.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front; keep the order of all other tests."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Draw the same random numbers in a test whatever ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture
def fresh_dynamo() -> None:
    """Discard everything that Dynamo compiled before the test, and what overlapc has warned of."""
    torch._dynamo.reset()
    backend = sys.modules.get("overlapc.backend")  # importing it here would cost each worker seconds
    if backend is not None:
        backend.advised.clear()
