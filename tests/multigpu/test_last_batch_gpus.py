"""Batches of other sizes and other graphs on one of two ranks, each with its own GPU or both on one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.multigpu.test_copies_gpus import on_ranks
from tests.planning.test_last_batch_ranks import (
    ROWS,
    begins_with_other_sizes,
    losses_of_one_process,
    texts,
    train,
    words,
)
from tests.planning.test_unequal_graphs_ranks import PROGRAMS, differences

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_a_batch_of_another_size_on_one_gpu_trains_as_in_one_process(tmp_path: Path) -> None:
    ranks = on_ranks(2, train, str(tmp_path), len(ROWS), "cuda")
    for each in ranks:
        assert each["losses"] == pytest.approx(losses_of_one_process(), rel=1e-4)
    assert [each["alone"] for each in ranks] == [[0, 0, 2, 2], [0, 2, 2, 4]]


def test_ranks_may_begin_with_batches_of_different_sizes(tmp_path: Path) -> None:
    expected = losses_of_one_process(texts(), whole=words())
    for cold, warm in on_ranks(2, begins_with_other_sizes, str(tmp_path), "cuda"):
        assert cold == pytest.approx(expected, rel=1e-4)
        assert warm == pytest.approx(expected, rel=1e-4)


def test_ranks_whose_graphs_differ_train_as_in_eager_mode(tmp_path: Path) -> None:
    for outcome in on_ranks(2, differences, str(tmp_path), "cuda"):
        assert set(outcome) == {program.__name__ for program in PROGRAMS}
        assert max(worst for worst, _ in outcome.values()) < 1e-5
        assert min(unequal for _, unequal in outcome.values()) > 0
