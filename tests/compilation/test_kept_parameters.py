"""Parameters stay gathered only where the plan of a forward and its backward says what that costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from overlapc.backend import plan_only
from tests.parallel.sharded import mesh_1d, shard
from tests.parallel.tiny import Block, Tiny, batch
from tests.worlds import fake_world

OPTIONS = {"profile": "h200-nvlink", "memory_budget": "1GiB", "passes": "raise_collectives,sink_waits"}
NOT_KEPT = "parameters not kept gathered: "


@pytest.fixture(autouse=True)
def _one_of_four_ranks() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with fake_world(4):
        yield


def planned(function: Callable[..., Any], *inputs: Tensor, **options: Any) -> tuple[int, list[str]]:
    """How many parameters stay gathered between forward and backward of `function`, and why others do not."""
    torch.compile(function, backend=partial(plan_only, options={**OPTIONS, **options}))(*inputs)
    reasons = [name.removeprefix(NOT_KEPT) for name in counters["overlapc"] if name.startswith(NOT_KEPT)]
    return counters["overlapc"]["gathers_kept_for_backward"], reasons


class Broken(nn.Module):
    """Two blocks on each side of a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(8, 16) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers[1](self.layers[0](x))
        torch._dynamo.graph_break()
        return self.layers[3](self.layers[2](h))


def test_none_are_kept_with_cuda_graphs_which_would_copy_them() -> None:
    reason = "CUDA graphs would copy them out of forward and into backward"
    model = shard(Tiny(layers=1), mesh_1d(), reshard_after_forward=True)
    assert planned(model, *batch(2), cuda_graphs=True) == (0, [reason])


def test_before_a_graph_break_none_are_kept_beside_what_the_rest_needs() -> None:
    kept, reasons = planned(shard(Broken(), mesh_1d(), reshard_after_forward=True), torch.ones(2, 8))
    assert (kept > 0, reasons) == (True, ["a graph break follows"])


@pytest.mark.filterwarnings("ignore:overlapc compiles a module of a sharded model by itself")
def test_blocks_that_are_compiled_one_by_one_keep_none() -> None:
    model = shard(Tiny(), mesh_1d(), reshard_after_forward=True)
    assert planned(model.layers[1], torch.ones(2, 3, 8)) == (0, ["a module is compiled by itself"])
