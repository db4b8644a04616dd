"""Rank 0 alone warns about the program; other ranks, which run the same program, do not."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.distributed import fsdp
from torch.distributed.device_mesh import init_device_mesh

from tests.worlds import fake_world


class Net(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:  # because Dynamo does not compile frames of torch itself
        return super().forward(x).relu()


def under_fsdp2() -> nn.Module:
    return fsdp.fully_shard(Net(8, 8), mesh=init_device_mesh("cpu", (2,)))


def under_ddp() -> nn.Module:
    return nn.parallel.DistributedDataParallel(Net(8, 8))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize(("rank", "times"), [(0, 1), (1, 0)])
@pytest.mark.parametrize(("made", "says"), [(under_fsdp2, "adopt_fsdp2"), (under_ddp, "DistributedDataParallel")])
def test_only_rank_0_warns(made, says, rank, times):
    with fake_world(2, rank), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.compile(made(), backend="overlapc", options={"rank_check": False})(torch.ones(2, 8))
    assert sum(says in str(each.message) for each in caught) == times
