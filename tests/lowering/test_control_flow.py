"""Higher-order ops run as calls: branches and loops over subgraphs."""

from __future__ import annotations

import pytest
import torch

from tests.lowering.compare import compiled, same

SHAPES = pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])


def branch(x, y):
    return torch.cond(x.sum() > 0, lambda a, b: (a * b + 1).sin(), lambda a, b: (a - b).cos(), (x, y)) * 2


@SHAPES
def test_cond_takes_the_branch_of_the_moment(dynamic):
    call = compiled(branch, dynamic)
    x, y = torch.rand(4, 3), torch.randn(4, 3)
    torch.testing.assert_close(call(x, y), branch(x, y))
    torch.testing.assert_close(call(-x, y), branch(-x, y))


def test_cond_is_differentiable():
    y = torch.randn(4, 3)
    for sign in (1, -1):
        x = (torch.rand(4, 3) * sign).requires_grad_()
        expected = torch.autograd.grad(branch(x, y).sum(), x)
        torch.testing.assert_close(torch.autograd.grad(compiled(branch)(x, y).sum(), x), expected)


def test_while_loop_ends_with_what_eager_has():
    from torch._higher_order_ops.while_loop import while_loop

    def function(x):
        start = torch.tensor(0)
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2 + 1), (start, x))[1] * 3

    same(function, torch.randn(4))
