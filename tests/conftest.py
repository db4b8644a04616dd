"""What all tests share."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch

# A test is about the compiler, not about what an earlier run of it left; tests/warm switches this on.
os.environ.setdefault("OVERLAPC_WARM_START", "0")
# Nor about how fast and how busy this machine is, which takes ten seconds to measure for each new cache folder.
if not torch.cuda.is_available():
    os.environ.setdefault("OVERLAPC_PROFILE", "cpu-gloo")

# Nor about the best order of nodes, which tests/passes and tests/schedules look at: a search is half of compiling.
os.environ.setdefault("OVERLAPC_SEARCH_EFFORT", "100")

# Files that take 20 seconds of a core or more, the longest first. Workers take files in this order: one that began with
# a long file when nothing else is left would keep the other waiting.
LONGEST = (
    "parallel/test_parity_steps.py",
    "programs/test_drawn.py",
    "test_parity_ranks.py",
    "trainers/test_huggingface_ranks.py",
    "trainers/test_torchtitan_ranks.py",
    "schedules/test_corpus.py",
    "launch/test_plan_model.py",
    "planning/test_keep_gathered_ranks.py",
    "launch/test_demo.py",
    "codegen/test_triton_cubin.py",
    "launch/test_torchrun.py",
    "compilation/test_folded_blocks.py",
    "planning/test_last_batch_ranks.py",
    "codegen/test_same_bits.py",
    "test_copies_ranks.py",
    "examples/test_examples.py",
    "launch/test_plan_script.py",
    "parallel/test_fsdp_graph.py",
    "warm/test_precompile.py",
    "warm/test_warm.py",
    "passes/test_bucket_ranks.py",
    "ops/test_sampled.py",
    "codegen/test_triton_kernels.py",
    "launch/test_calibrate.py",
    "lowering/test_scatter.py",
    "launch/test_hosts.py",
    "test_comparisons.py",
    "parallel/test_fsdp_module_ranks.py",
    "codegen/test_flex_attention.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; the others stay as they are."""
    here = Path(__file__).parent
    places = {here / name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_collection_finish() -> None:
    """What was imported until now stays: garbage collections, a tenth of the time otherwise, pass it by."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def fresh_dynamo() -> None:
    """Nothing that was compiled before is found."""
    torch._dynamo.reset()
