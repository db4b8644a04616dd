"""Ten steps compared with eager FSDP2 or TP over NCCL.

Nearly all of the time goes into compiling, on one core per rank. So the cases are divided among several launches that
run at the same time and share GPUs and compiled kernels.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from tests.parallel.parity import FOUR, TWO, Case, check, check_overlap, seen_by
from tests.ranks import values_on_ranks

LAUNCHES = 3  # per number of ranks
SECONDS = 110  # timeout of a launch, which takes about 20 s

Seen = Callable[[int, str], list[Any]]


@pytest.fixture(scope="module")
def seen() -> Iterator[Seen]:
    """Start all launches at the same time; return a function from (ranks, case name) to the results of every rank."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(gpu) for gpu in range(torch.cuda.device_count())] if given is None else given.split(",")
    launched: dict[tuple[int, str], Future[list[Any]]] = {}
    with ThreadPoolExecutor(2 * LAUNCHES) as pool:
        for ranks, cases in ((2, TWO), (4, FOUR)):
            for number in range(LAUNCHES if len(gpus) >= ranks else 0):
                dealt, overlap = cases[number::LAUNCHES], number == 0 and ranks == 2
                first = ranks * number % (len(gpus) // ranks * ranks)
                env = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + ranks])}
                future = pool.submit(
                    values_on_ranks, seen_by, ranks, dealt, "cuda", overlap,
                    timeout_s=SECONDS, env=env, backend="nccl",
                )  # fmt: skip
                names = [case.name for case in dealt] + ["overlap"] * overlap
                launched.update({(ranks, name): future for name in names})

        def of(ranks: int, name: str) -> list[Any]:
            if len(gpus) < ranks:
                pytest.skip(f"needs {ranks} GPUs, found {len(gpus)}")
            return [on_rank[name] for on_rank in launched[ranks, name].result()]

        yield of


@pytest.mark.parametrize("case", TWO, ids=lambda case: case.name)
def test_two_gpus_match_eager(seen: Seen, case: Case):
    check(seen(2, case.name), case)


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
def test_four_gpus_match_eager(seen: Seen, case: Case):
    check(seen(4, case.name), case)


def test_overlap_changes_neither_bits_nor_kernels(seen: Seen):
    check_overlap(seen(2, "overlap"))
