"""Sharded models are traced on torch's fake process group: rank 1 of 4, no communication."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(scope="module")
def world():
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
