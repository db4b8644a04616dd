"""Forwards that are not one graph gather and reduce on GPUs, too, also if ranks read different parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import overlapc.parallel.full
from tests.parallel.test_gathered import errors
from tests.ranks import on_gpus, values_on_ranks

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def errors_with_slow_reductions(compiled: bool) -> dict[str, float]:
    """Return `errors` if a reduction ends milliseconds after its module's backward, which does not wait for it."""
    reduce_used = overlapc.parallel.full.reduce_used

    def slowly(*args: Any) -> list[Any]:
        parts = reduce_used(*args)
        torch.cuda._sleep(5_000_000)
        return [None if part is None else part.clone() for part in parts]

    overlapc.parallel.full.reduce_used = slowly
    return errors(compiled, "cuda")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_those_of_the_model_that_is_not_sharded(compiled: bool):
    for found in values_on_ranks(errors_with_slow_reductions, 2, compiled, timeout_s=280, **on_gpus(2)):
        assert {case: value for case, value in found.items() if value > 1e-5} == {}
