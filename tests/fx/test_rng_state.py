"""Operators under a checkpoint that draw random numbers, or that torch traces as if they did."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from overlapc.parallel import fully_shard
from overlapc.report import record
from overlapc.schedule.model import Kind
from overlapc.schedule.text import parse
from tests.worlds import fake_world


def block(x, w):
    q = (x @ w).view(1, 8, 4, 16).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q, is_causal=True).transpose(1, 2).reshape(8, 64) + x


def two_blocks(x, w):
    return checkpoint(block, checkpoint(block, x, w, use_reentrant=False), w, use_reentrant=False).square().sum()


def test_checkpointed_attention_is_recomputed_without_random_state():
    torch.manual_seed(0)
    x, w = torch.randn(8, 64), torch.randn(64, 64).mul_(0.1)
    results = []
    record.clear()
    torch._dynamo.reset()
    options = {"profile": "cpu-gloo", "warm_start": False}
    for run in (two_blocks, torch.compile(two_blocks, backend="overlapc", fullgraph=True, options=options)):
        given = [each.clone().requires_grad_() for each in (x, w)]
        loss = run(*given)
        loss.backward()
        results.append((loss, given[0].grad, given[1].grad))
    torch.testing.assert_close(results[1], results[0])
    forward, backward = (parse(graph.schedule) for graph in record.report_of_process().steps[0].graphs)
    attention = [node for node in backward.nodes if node.kind is Kind.EXTERN and "attention" in node.op]
    assert len([node for node in attention if not node.op.endswith("backward")]) == 2
    assert not any("rng" in node.op for graph in (forward, backward) for node in graph.nodes)


def dropped(x, w):
    return F.dropout(torch.relu(x @ w), 0.5)


def test_a_checkpoint_draws_eagers_random_numbers_again():
    x, w = (torch.randn(8, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True))

    def function(x, w):
        return checkpoint(dropped, x, w, use_reentrant=False).square().sum()

    torch._dynamo.reset()
    compiled = torch.compile(function, backend="overlapc", options={"fallback_random": True, "warm_start": False})
    results = []
    for run in (function, compiled):
        torch.manual_seed(0)
        loss = run(x, w)
        results.append((loss, *torch.autograd.grad(loss, (x, w))))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("wrapper", ["python", "fx"])
def test_dropout_inside_and_outside_of_a_checkpoint_equals_eager(wrapper):
    def function(x):
        inside = checkpoint(lambda q: F.dropout(q, 0.5) * q, x, use_reentrant=False)
        return (inside + F.dropout(x, 0.4)).square().sum()

    x = torch.randn(8, 16, requires_grad=True)
    options = {"fallback_random": True, "wrapper": wrapper, "warm_start": False}
    torch._dynamo.reset()
    results = []
    for run in (function, torch.compile(function, backend="overlapc", options=options)):
        torch.manual_seed(0)
        loss = run(x)
        results.append((loss, *torch.autograd.grad(loss, x)))
    torch.testing.assert_close(results[1], results[0])


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def part(self, x):
        return F.dropout(self.first(x), 0.5).tanh() + F.dropout(self.second(x), 0.5).tanh()

    def forward(self, x):
        return checkpoint(self.part, checkpoint(self.part, x, use_reentrant=False), use_reentrant=False).sum()


def test_the_states_of_a_sharded_model_are_saved_with_tensors_and_not_behind_its_mesh():
    with fake_world(1):
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = Dropped()
        sharded = copy.deepcopy(model)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        options = {"fallback_random": True, "warm_start": False}
        results = []
        for run in (model, torch.compile(sharded, backend="overlapc", fullgraph=True, options=options)):
            torch.manual_seed(0)
            loss = run(torch.ones(4, 8))
            loss.backward()
            results.append((loss, run.first.weight.grad))
        torch.testing.assert_close(results[1][0], results[0][0])
        torch.testing.assert_close(results[1][1].full_tensor(), results[0][1])
