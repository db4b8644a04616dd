"""What tests/runtime/test_step.py runs in a process of its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overlapc.runtime import support


def check(cache_dir: str) -> None:
    """Backward goes on in the memory of what forward saved, and leaves it alone where somebody still needs it."""
    x, weight = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16)
    options = {"warm_start": False, "cache_dir": cache_dir}

    def function(x: Tensor) -> Tensor:
        return (x @ weight).sin()

    step = torch.compile(function, backend="overlapc", options=options)
    (expected,) = torch.autograd.grad(function(x).sum(), x)

    def gradient(result: Tensor, **options: Any) -> Tensor:
        (grad,) = torch.autograd.grad(result.sum(), x, **options)
        return grad

    torch.testing.assert_close(gradient(step(x)), expected)  # compiled now
    taken: list[Tensor] = []
    take_over = support.take_over

    def watched(source: Tensor, *form: Any) -> Tensor:
        taken.append(source)
        return take_over(source, *form)

    support.take_over = watched
    result = step(x)
    for keeps in (True, True, False):
        torch.testing.assert_close(gradient(result, retain_graph=keeps), expected)
        assert bool(taken) != keeps
    taken.clear()

    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: kept.append(saved) or saved, lambda saved: saved):
        result = step(x)
    before = [each.clone() for each in kept]
    torch.testing.assert_close(gradient(result), expected)
    assert all(torch.equal(one, other) for one, other in zip(before, kept, strict=True))
    assert not taken
