"""Ten steps compared with eager FSDP2 or TP on real gloo ranks, one launch for two ranks and one for four."""

from __future__ import annotations

from typing import Any

import pytest

from tests.parallel.parity import FOUR, TWO, Case, check, check_overlap, seen_by
from tests.ranks import values_on_ranks


@pytest.fixture(scope="module")
def two() -> list[Any]:
    return values_on_ranks(seen_by, 2, TWO, "cpu", True, timeout_s=280)


@pytest.fixture(scope="module")
def four() -> list[Any]:
    return values_on_ranks(seen_by, 4, FOUR, "cpu", timeout_s=280)


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_two_ranks_match_eager(two, case: Case):
    check([seen[case.name] for seen in two], case)


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
def test_four_ranks_match_eager(four, case: Case):
    check([seen[case.name] for seen in four], case)


def test_overlap_changes_neither_bits_nor_kernels(two):
    check_overlap([seen["overlap"] for seen in two])
