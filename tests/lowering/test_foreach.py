"""`_foreach` ops on lists of tensors are generated and fused into one kernel, and optimizers step as in eager."""

from __future__ import annotations

import pytest
import torch

from overlapc.runtime.counters import counted
from tests.lowering.against_eager import same

CALLS = [
    lambda x, y: torch._foreach_add([x, y], [y, x], alpha=2),
    lambda x, y: torch._foreach_sub([x, y], 3),
    lambda x, y: torch._foreach_mul([x, y], [2.0, 3.0]),
    lambda x, y: torch._foreach_mul([x, y], torch.tensor(2.0)),
    lambda x, y: torch._foreach_div([x, y], [y, x]),
    lambda x, y: torch._foreach_sqrt(torch._foreach_abs([x, y])),
    lambda x, y: torch._foreach_addcmul([x, y], [y, x], [x, x], 0.5),
    lambda x, y: torch._foreach_addcdiv([x, y], [y, x], [x, y], [0.5, 2.0]),
    lambda x, y: torch._foreach_lerp([x, y], [y, x], 0.3),
    lambda x, y: torch._foreach_pow(2.0, [x, y]),
    lambda x, y: torch._foreach_pow([x, y], 3),
    lambda x, y: torch._foreach_norm([x, y, x.t()]),
    lambda x, y: torch._foreach_norm([x, y], 1),
    lambda x, y: torch._foreach_norm([x, y], float("inf")),
    lambda x, y: torch._foreach_clamp_min(torch._foreach_maximum([x, y], [y, x]), 0.2),
]


@pytest.mark.parametrize("function", CALLS)
def test_foreach_ops_equal_eager_without_fallbacks(function):
    torch._dynamo.utils.counters.clear()
    same(function, torch.randn(4, 3), torch.randn(4, 3))
    assert counted("fallbacks") == 0


def test_a_list_op_is_one_launch():
    torch._dynamo.utils.counters.clear()
    tensors = [torch.randn(size, 3) for size in (1, 4, 50, 50, 7)]
    same(lambda *x: torch._foreach_add(torch._foreach_exp(list(x)), 1), *tensors)
    assert counted("kernels") == 1


def test_gradients_are_clipped_in_three_launches():
    """One computes the norms, one the total norm and the factor, one scales the gradients."""
    torch._dynamo.utils.counters.clear()

    def clip(*gradients):
        leaves = [torch.zeros_like(gradient) for gradient in gradients]
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient
        total = torch.nn.utils.clip_grad_norm_(leaves, 0.5, foreach=True)
        return total, [leaf.grad for leaf in leaves]

    same(clip, *(torch.randn(size, 3) for size in (1, 4, 50, 50, 7)))
    assert counted("kernels") == 3
    assert counted("fallbacks") == 0


def test_foreach_ops_in_place_equal_eager():
    def function(x, y):
        torch._foreach_mul_([x, y], 2)
        torch._foreach_add_([x, y], [x.sin(), y.cos()])
        return x + y

    same(function, torch.randn(3), torch.randn(3))


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"foreach": False}),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "foreach": True}),
        (torch.optim.RMSprop, {"foreach": True}),
    ],
)
def test_optimizers_step_as_in_eager(kind, options):
    start = [torch.randn(size, 3) for size in (2, 5)]
    eager, ours = ([tensor.clone().requires_grad_() for tensor in start] for _ in range(2))
    eager_optimizer, our_optimizer = kind(eager, **options), kind(ours, **options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    step = torch.compile(our_optimizer.step, backend="overlapc")
    for _ in range(3):
        for parameter in (*eager, *ours):
            parameter.grad = parameter.detach().sin()
        eager_optimizer.step()
        step()
    torch.testing.assert_close(ours, eager)
    assert counted("kernels") > 0
    assert counted("fallbacks") == counted("fallback copy_")


def test_an_update_in_place_needs_no_memory_and_is_one_kernel():
    def step(parameters, gradients, means, squares):
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_mul_(squares, 0.9)
        torch._foreach_addcmul_(squares, gradients, gradients, 0.1)
        torch._foreach_addcdiv_(parameters, means, torch._foreach_sqrt(squares), -0.1)

    torch._dynamo.utils.counters.clear()
    lists = [[torch.rand(3 * 2**18) for _ in range(3)] for _ in range(4)]  # 3 MiB each: large enough to limit fusion
    with torch.no_grad():
        torch.compile(step, backend="overlapc")(*lists)
    assert counted("kernels") == 1
