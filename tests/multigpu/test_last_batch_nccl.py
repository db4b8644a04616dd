"""A smaller batch on one rank of two GPUs, over NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.planning.test_last_batch_ranks import ROWS, losses_of_one_process, train
from tests.ranks import values_on_ranks


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_a_batch_of_another_size_on_one_gpu_trains_as_in_one_process(tmp_path: Path) -> None:
    ranks = values_on_ranks(train, 2, str(tmp_path), len(ROWS), "cuda", timeout_s=240, backend="nccl")
    for each in ranks:
        assert each["losses"] == pytest.approx(losses_of_one_process(), rel=1e-4)
    assert [each["alone"] for each in ranks] == [[0, 0, 2, 2], [0, 2, 2, 4]]
