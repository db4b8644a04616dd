"""A bucket of tensors of several dtypes is one NCCL launch with the same bits; each NCCL call within has one dtype."""

from __future__ import annotations

import pytest
import torch

from tests.passes.test_bucket_ranks import check_precisions, precisions
from tests.ranks import values_on_ranks


def test_several_dtypes_are_one_launch():
    if torch.cuda.device_count() < 2:
        pytest.skip(f"needs 2 GPUs, found {torch.cuda.device_count()}")
    check_precisions(values_on_ranks(precisions, 2, "cuda", "h200-nvlink", timeout_s=100, backend="nccl"))
