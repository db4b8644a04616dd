"""Forwards that are not one graph gather and reduce on GPUs, too, also if ranks read different parameters."""

from __future__ import annotations

import pytest
import torch

from tests.parallel.test_gathered import errors
from tests.ranks import on_gpus, values_on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_those_of_the_model_that_is_not_sharded(compiled: bool):
    for found in values_on_ranks(errors, 2, compiled, "cuda", timeout_s=280, **on_gpus(2)):
        assert {case: value for case, value in found.items() if value > 1e-5} == {}
