"""tests/ranks.py: errors of ranks become outcomes, and no process outlives the launch."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import LaunchFailed, alive, run_on_ranks, values_on_ranks


def summed(scale: float) -> tuple[int, float]:
    total = torch.tensor([scale * (dist.get_rank() + 1)])
    dist.all_reduce(total)
    return os.getpid(), total.item()


def one_raises() -> int:
    if dist.get_rank() == 1:
        raise ValueError("rank 1 cannot")
    return os.getpid()


def one_dies() -> None:
    if dist.get_rank() == 1:
        os._exit(3)


def one_hangs(folder: str) -> None:
    (Path(folder) / str(os.getpid())).touch()
    if dist.get_rank() == 1:
        time.sleep(600)


def test_values_are_returned_in_rank_order():
    values = values_on_ranks(summed, 2, 1.5)
    assert [total for _, total in values] == [4.5, 4.5]
    assert len({pid for pid, _ in values} | {os.getpid()}) == 3


def test_an_exception_of_a_rank_is_its_outcome_or_fails_the_test():
    first, second = run_on_ranks(one_raises, 2)
    assert (first.error_type, second.error_type, second.error) == ("", "ValueError", "rank 1 cannot")
    with pytest.raises(LaunchFailed, match=r"(?s)--- rank 1\n.*in one_raises\n.*ValueError: rank 1 cannot"):
        values_on_ranks(one_raises, 2)


def test_a_rank_that_dies_is_named():
    with pytest.raises(LaunchFailed, match=r"(?s)rank 1 of 2 left no outcome \(it died\)\n.*exitcode\s*: 3"):
        run_on_ranks(one_dies, 2)


def test_a_rank_that_hangs_is_ended_and_its_stack_is_shown(tmp_path: Path):
    began = time.monotonic()
    values_on_ranks(summed, 2, 1.0)
    timeout_s = 2 + 4 * (time.monotonic() - began)  # enough for ranks to start, on however busy a machine
    began = time.monotonic()
    with pytest.raises(LaunchFailed, match=r"(?s)ranks still ran after .* s\n.*in one_hangs\n"):
        run_on_ranks(one_hangs, 2, str(tmp_path), timeout_s=timeout_s)
    assert time.monotonic() - began < timeout_s + 30
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2
    assert not any(alive(pid) for pid in pids)
