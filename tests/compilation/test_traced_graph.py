"""`compile_graph` compiles a graph of forward, loss and backward that the caller traced."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import overlapc
from overlapc.runtime.counters import counted


def step(weight: Tensor, x: Tensor, target: Tensor) -> list[Tensor]:
    loss = F.cross_entropy(torch.tanh(x @ weight), target)
    return [loss, *torch.autograd.grad(loss, [weight])]


def test_a_graph_of_forward_loss_and_backward_equals_eager():
    torch.manual_seed(0)
    weight, x, target = torch.randn(6, 8, requires_grad=True), torch.randn(4, 6), torch.tensor([1, 3, 5, 7])
    gm = make_fx(step, tracing_mode="fake")(weight, x, target)
    kernels = counted("kernels")
    compiled = overlapc.compile_graph(gm, [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")])
    assert counted("kernels") > kernels
    assert isinstance(compiled, torch.fx.GraphModule)
    for _ in range(2):
        loss, grad = compiled(weight, x, target)
        want, want_grad = step(weight, x, target)
        torch.testing.assert_close(loss, want.detach())
        torch.testing.assert_close(grad, want_grad)
        assert not grad.requires_grad
        with torch.no_grad():
            weight -= grad


def test_a_graph_may_return_a_tensor_alone():
    x = torch.randn(4, 6)
    gm = make_fx(lambda x: x.sin() + 1, tracing_mode="fake")(x)
    before = gm.code
    torch.testing.assert_close(overlapc.compile_graph(gm, [x])(x), x.sin() + 1)
    assert gm.code == before
