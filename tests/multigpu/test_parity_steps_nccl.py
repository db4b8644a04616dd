"""Ten steps beside eager FSDP2 or TP over NCCL, one launch for two GPUs and one for four."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parallel.parity import FOUR, TWO, Case, check, check_overlap, seen_by
from tests.ranks import values_on_ranks


def outcomes(cases: tuple[Case, ...], ranks: int) -> list[Any]:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {torch.cuda.device_count()}")
    return values_on_ranks(seen_by, ranks, cases, "cuda", timeout_s=280, backend="nccl")


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return outcomes(TWO, 2)


@pytest.fixture(scope="module")
def four() -> list[Any]:
    return outcomes(FOUR, 4)


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_two_gpus_match_eager(two, case: Case):
    check(two, case)


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
def test_four_gpus_match_eager(four, case: Case):
    check(four, case)


def test_overlap_changes_neither_bits_nor_kernels(two):
    check_overlap(two)
