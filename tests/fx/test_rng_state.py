"""Operators under a checkpoint that draw random numbers, or that torch traces as if they did."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from overlapc.report import record
from overlapc.schedule.model import Kind
from overlapc.schedule.text import parse


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
