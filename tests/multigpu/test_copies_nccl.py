"""Collectives by copies over NVLink: ten steps beside eager FSDP2, sums against float64, bits under random delays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.parallel.parity import TWO, check, seen_by
from tests.ranks import values_on_ranks
from tests.test_copies_ranks import check_parity, check_sums, parity, sums

CASES = tuple(case for case in TWO if case.name in ("reshard", "mixed precision", "accumulate", "uneven", "experts"))
pytestmark = [pytest.mark.gpu(2), pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")]


def on_gpu(function: Any, *args: Any) -> Any:
    """`function` on this rank's GPU."""
    torch.cuda.set_device(dist.get_rank())
    return function(*args)


def test_ten_steps_match_eager():
    outcomes = values_on_ranks(seen, 2, timeout_s=110, backend="nccl")
    for case in CASES:
        check([on_rank[case.name] for on_rank in outcomes], case)


def seen() -> dict[str, dict[str, Any]]:
    """`compare` for every case."""
    return seen_by(CASES, "cuda", transport="copy")


def test_steps_are_those_over_nccl_and_have_the_same_bits_with_random_delays():
    check_parity(values_on_ranks(on_gpu, 2, parity, "bf16", "cuda", 200, timeout_s=110, backend="nccl"), 2e-2)


def test_sums_are_in_order_of_ranks_and_as_exact_as_a_float32_reduce_scatter():
    check_sums(values_on_ranks(on_gpu, 2, sums, "cuda", timeout_s=110, backend="nccl"))
