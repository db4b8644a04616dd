"""The cases of tests/test_parity_ranks.py on GPUs with Triton kernels: loss and every gradient equal one process's, in
float32.

Over NCCL with a GPU for each rank; the cases by copies also where ranks share a GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.ranks import on_gpus, values_on_ranks
from tests.test_parity_ranks import FOUR, TWO, check, errors


@pytest.mark.parametrize(("ranks", "cases"), [(2, TWO), (4, FOUR)], ids=["two-ranks", "four-ranks"])
def test_loss_and_gradients_equal_one_process(ranks, cases):
    gpus = torch.cuda.device_count()
    if not gpus:
        pytest.skip("needs a GPU")
    cases = tuple(case for case in cases if gpus >= ranks or case.transport == "copy")
    check(values_on_ranks(errors, ranks, cases, "cuda", timeout_s=240, **on_gpus(ranks)), cases)
