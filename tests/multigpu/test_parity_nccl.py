"""The main job over NCCL with Triton kernels: loss and every gradient equal to one process, in fp32."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import values_on_ranks
from tests.test_parity_ranks import FOUR, TWO, check, errors


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)], ids=["two-gpus", "four-gpus"])
def test_loss_and_gradients_equal_one_process(ranks, cases):
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs, found {torch.cuda.device_count()}")
    check(values_on_ranks(errors, ranks, cases, "cuda", timeout_s=240, backend="nccl"), cases)
