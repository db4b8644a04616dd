"""Backward gets the sizes that the shapes of its arguments are made of."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool1d


def test_sizes_of_an_input_that_is_the_base_of_another():
    """AOTAutograd gives `base` other symbols than Dynamo passes as arguments; backward reads a value of size A*B*2."""

    def fn(x: Tensor, base: Tensor, view: Tensor) -> tuple[Tensor, Tensor]:
        pooled = adaptive_avg_pool1d(x, 2) if x.shape[2] > 4 else x[..., :2] * 2  # compiled again for B = 4
        return pooled.take(base.flatten().remainder(pooled.numel())[:4]), -view

    torch._dynamo.reset()
    compiled = torch.compile(fn, backend="overlapc", dynamic=True, options={"native": False})
    for A, B in ((6, 5), (7, 4)):
        x, base = torch.randn(2, A, B, requires_grad=True), torch.randint(0, 9, (2, A, B))
        gradients = [torch.autograd.grad(call(x, base, base[..., 0])[0].sum(), x)[0] for call in (compiled, fn)]
        assert torch.equal(*gradients)
