"""DTensors with a dim that ranks do not divide evenly: torch pads on some ranks only, and they compile equal graphs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from overlapc.runtime.counters import counted
from tests.ranks import values_on_ranks

ROWS = 5


def gathered(x: DTensor) -> Tensor:
    return x.sin().redistribute(placements=[Replicate()]).to_local() + 1


def sharded_by_columns(x: DTensor) -> Tensor:
    return x.sin().redistribute(placements=[Shard(1)]).to_local() + 1


def normalized(x: DTensor) -> Tensor:
    return torch.softmax(x, 0).to_local()


def reduced(x: DTensor) -> Tensor:
    return torch.linalg.vector_norm(x).full_tensor() * x.mean().full_tensor()


def added_up(x: DTensor) -> Tensor:
    """Sum products of all ranks into rows, of which the last rank has fewer; as sequence parallelism does."""
    columns = x.redistribute(placements=[Shard(1)])
    return (columns @ columns.t()).redistribute(placements=[Shard(0)]).to_local() * 2


PROGRAMS = {each.__name__: each for each in (gathered, sharded_by_columns, normalized, reduced, added_up)}


def error(program: str, rows: int = ROWS) -> float:
    """Return the largest difference of results and gradients from eager mode."""
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.randn(rows, 3, generator=torch.Generator().manual_seed(0))
    seen = []
    for function in (PROGRAMS[program], torch.compile(PROGRAMS[program], backend="overlapc")):
        x = distribute_tensor(whole, mesh, [Shard(0)]).requires_grad_()
        result = function(x)
        result.square().sum().backward()
        assert isinstance(x.grad, DTensor)
        seen.append([result, x.grad.to_local()])
    return float(torch.cat([(want - got).flatten() for want, got in zip(*seen, strict=True)]).abs().max())


@pytest.mark.parametrize("program", PROGRAMS)
def test_results_and_gradients_are_eagers(program: str) -> None:
    assert max(values_on_ranks(error, 2, program, timeout_s=60)) < 1e-6


def test_a_rank_may_have_no_rows() -> None:
    """Its gradient is a part of the gathered one, too."""
    assert max(values_on_ranks(error, 2, "gathered", 1, timeout_s=60)) < 1e-6


def gathered_beside(x: DTensor) -> tuple[Tensor, Tensor]:
    return x.redistribute(placements=[Replicate()]).to_local() * 2, (x + 1).to_local()


def fused_in_different_ways() -> tuple[float, int]:
    """Return the largest difference from eager mode, and how many graphs are unlike those of other ranks."""
    whole = torch.randn(ROWS, 3, generator=torch.Generator().manual_seed(0))
    x = distribute_tensor(whole, init_device_mesh("cpu", (2,)), [Shard(0)])
    functions: list[Callable[..., tuple[Tensor, Tensor]]] = [gathered_beside]
    functions.append(torch.compile(gathered_beside, backend="overlapc"))
    pairs = zip(*(function(x) for function in functions), strict=True)
    return max(float((want - got).abs().max()) for want, got in pairs), counted("graphs_unlike_those_of_other_ranks")


def test_ranks_may_fuse_a_graph_in_different_ways() -> None:
    """The rank that pads nothing has a copy of the same size as the other kernel."""
    assert values_on_ranks(fused_in_different_ways, 2, timeout_s=60) == [(0.0, 1)] * 2
