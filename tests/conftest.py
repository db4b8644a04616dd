"""Environment, order and fixtures of all tests."""

from __future__ import annotations

import gc
import os
import sys
from importlib import import_module
from pathlib import Path

import pytest
from hypothesis import settings

# Tests must not use results that earlier runs left in the warm-start cache; tests/warm switches it on.
os.environ.setdefault("OVERLAPC_WARM_START", "0")

# Most tests do not need the best order of nodes, and searching for it takes half of the compile time: search less.
# tests/passes and tests/schedules test the search.
os.environ.setdefault("OVERLAPC_SEARCH_EFFORT", "100")

# No test of examples fails because this machine is busy: by default an example may take 200 ms.
settings.register_profile("any machine", deadline=None)
settings.load_profile("any machine")

# Collections of garbage go over all that torch and sympy keep, again and again: a seventh of the CPU time of
# parallel/test_replayed_blocks.py with lowering/test_scatter.py.
gc.set_threshold(50_000, 20, 100)

# Files that took 19 seconds or more beside another worker, longest first. Workers take files in this order: a worker
# that starts a long file last would keep the other workers waiting.
LONGEST = (
    "planning/test_last_batch_ranks.py",
    "parallel/test_parity_steps.py",
    "planning/test_repeated_layers.py",
    "codegen/test_triton_cubin.py",
    "planning/test_keep_gathered_ranks.py",
    "trainers/test_torchtitan_ranks.py",
    "parallel/test_gathered.py",
    "schedules/test_corpus.py",
    "parallel/test_shared_graphs.py",
    "programs/test_drawn.py",
    "parallel/test_fsdp_module_ranks.py",
    "trainers/test_huggingface_ranks.py",
    "warm/test_warm.py",
    "lowering/test_scatter.py",
    "parallel/test_dtensor_fsdp_ranks.py",
    "launch/test_demo.py",
    "launch/test_calibrate.py",
    "launch/test_torchrun.py",
    "compilation/test_folded_blocks.py",
    "ops/test_sampled.py",
    "warm/test_precompile.py",
    "parallel/test_replayed_blocks.py",
    "test_parity_ranks.py",
    "lowering/test_symbolic.py",
    "launch/test_plan_model.py",
    "codegen/test_same_bits.py",
    "lowering/test_numbers.py",
    "codegen/test_triton_kernels.py",
    "test_copies_ranks.py",
    "test_registration.py",
    "warm/test_warm_ranks.py",
    "passes/test_bucket_ranks.py",
    "launch/test_plan_script.py",
    "test_comparisons.py",
    "parallel/test_fsdp_graph.py",
    "examples/test_examples.py",
    "parallel/test_fsdp_ranks.py",
    "launch/test_hosts.py",
    "codegen/test_flex_attention.py",
    "estimators/simulator/test_incremental.py",
    "benchmarks/test_turns.py",
    "planning/test_unequal_graphs_ranks.py",
    "fusion/test_models.py",
)


def pytest_configure(config: pytest.Config) -> None:
    """Import torch, but not in the process that only distributes tests: its workers start after this."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch

    import_module("tests.untimed_guards")
    # Nor do tests depend on the speed and load of this machine, which takes ten seconds to measure for each new folder.
    if not torch.cuda.is_available():
        os.environ.setdefault("OVERLAPC_PROFILE", "cpu-gloo")


def pytest_sessionfinish() -> None:
    """Free the garbage of the tests; pytest still reports errors of their destructors. The collections that pytest and
    Python make at their ends then visit no other objects, which takes seconds each time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move the longest files to the front; keep the order of all other tests."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """Draw the same random numbers in a test whatever ran before it in its process."""
    import torch

    torch.manual_seed(0)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A folder for `cache_dir` in which nothing is compiled yet (tests/caches.py)."""
    from tests.caches import new_cache

    return new_cache(tmp_path / "cache")


@pytest.fixture
def fresh_dynamo() -> None:
    """Discard everything that Dynamo compiled before the test, and what overlapc has warned of."""
    import torch

    torch._dynamo.reset()
    backend = sys.modules.get("overlapc.backend")  # importing it here would cost each worker seconds
    if backend is not None:
        backend.advised.clear()
