"""What the partitioner saves and recomputes; for sharded parameters see tests/parallel/test_fsdp_graph.py."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import checkpoint

from tests.parallel.tiny import Recorder, ops


class Gathering(nn.Module):
    """Two matmuls around an all-gather of activations (not of a parameter)."""

    def __init__(self, group: str, ac: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.group, self.ac = group, ac

    def inner(self, x: Tensor) -> Tensor:
        h = torch.ops._c10d_functional_autograd.all_gather_into_tensor(torch.sin(self.a(x)), 4, self.group)
        return torch.cos(self.b(torch.ops._c10d_functional.wait_tensor(h))).sum()

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False) if self.ac else self.inner(x)


def graphs(model: nn.Module, *inputs: Tensor, **how) -> tuple[list[str], list[str]]:
    torch._dynamo.reset()
    recorder = Recorder(**how)
    torch.compile(model, backend=recorder, fullgraph=True)(*inputs).backward()
    return ops(recorder.forward[0]), ops(recorder.backward[0])


def test_collectives_of_activations_and_matmuls_are_not_recomputed(world):
    forward, backward = graphs(Gathering(world), torch.ones(2, 4))
    assert forward.count("all_gather_into_tensor") == 1
    assert "all_gather_into_tensor" not in backward
    assert backward.count("mm") == 3  # gradients of b, of its input, of a


def test_a_users_checkpoint_recomputes_collectives_and_matmuls(world):
    _, backward = graphs(Gathering(world, ac=True), torch.ones(2, 4))
    assert backward.count("all_gather_into_tensor") == 1
    assert backward.count("mm") == 3 + 2


def test_without_collectives_the_partition_is_torchs_own_without_aliases():
    model = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1), nn.Flatten(0))
    loss = nn.Sequential(model, nn.Softmax(0))
    wrapped = Summed(loss)
    ours = graphs(wrapped, torch.ones(4, 4))
    theirs = graphs(wrapped, torch.ones(4, 4), partition_fn=min_cut_rematerialization_partition)
    assert list(ours) == [[op for op in ops if op != "detach"] for ops in theirs]


class Logging(nn.Module):
    """Reduces a metric in forward, or in backward by a hook, and does not read the result."""

    def __init__(self, group: str, in_backward: bool) -> None:
        super().__init__()
        self.inner, self.group, self.in_backward = nn.Linear(4, 4), group, in_backward

    def log(self, x: Tensor) -> None:
        total = torch.ops._c10d_functional.all_reduce(x.detach().sum(), "sum", self.group)
        torch.ops._c10d_functional.wait_tensor(total)

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x).sin()
        if self.in_backward:
            h.register_hook(self.log)
        else:
            self.log(h)
        return h.sum()


@pytest.mark.parametrize("in_backward", [False, True])
def test_a_collective_that_nothing_reads_stays_where_the_program_issues_it(world, in_backward):
    found = [names.count("all_reduce") for names in graphs(Logging(world, in_backward), torch.ones(2, 4))]
    assert found == [not in_backward, in_backward]


class Summed(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().sum()
