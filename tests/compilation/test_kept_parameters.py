"""Parameters stay gathered from forward to backward only if forward and its backward are planned together."""

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
    """Return how many parameters of `function` stay gathered until backward, and the reasons for the rest."""
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


def test_no_parameter_stays_gathered_with_cuda_graphs() -> None:
    reason = "CUDA graphs would copy them out of forward and into backward"
    model = shard(Tiny(layers=1), mesh_1d(), reshard_after_forward=True)
    assert planned(model, *batch(2), cuda_graphs=True) == (0, [reason])


def test_parameters_before_a_graph_break_do_not_stay_gathered() -> None:
    kept, reasons = planned(shard(Broken(), mesh_1d(), reshard_after_forward=True), torch.ones(2, 8))
    assert (kept > 0, reasons) == (True, ["a graph break follows"])


@pytest.mark.filterwarnings("ignore:overlapc compiles a module of a sharded model by itself")
def test_a_block_compiled_by_itself_keeps_no_parameter_gathered() -> None:
    model = shard(Tiny(), mesh_1d(), reshard_after_forward=True)
    assert planned(model.layers[1], torch.ones(2, 3, 8)) == (0, ["a module is compiled by itself"])
