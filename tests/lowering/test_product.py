"""Matrix products as generated kernels (`matmul=native`): results equal eager's, and surrounding ops are fused in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapc.runtime.counters import counted
from tests.lowering.against_eager import compiled


def check(function: Callable[..., Any], *args: Tensor, kernels: int, dynamic: bool = False, **tolerance: float) -> None:
    """Assert that the result equals eager's and that `kernels` generated kernels and no library call compute it."""
    before = {name: counted(name) for name in ("kernels", "externs", "fallbacks")}
    found = compiled(function, dynamic, matmul="native")(*args)
    made = {name: counted(name) - count for name, count in before.items()}
    torch.testing.assert_close(found, function(*args), **tolerance)
    assert made == {"kernels": kernels, "externs": 0, "fallbacks": 0}


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_a_linear_layer_with_its_activation_and_residual_is_one_kernel(dynamic):
    x, residual, weight, bias = torch.randn(3, 20, 24), torch.randn(3, 20, 40), torch.randn(40, 24), torch.randn(40)
    check(lambda x, r, w, b: F.silu(F.linear(x, w, b)) + r, x, residual, weight, bias, kernels=1, dynamic=dynamic)


def test_casts_of_the_factors_are_fused_into_the_product():
    x, weight = torch.randn(16, 32), torch.randn(32, 24)
    tolerance = {"rtol": 1.6e-2, "atol": 1e-2}
    check(lambda x, w: x.bfloat16() @ w.bfloat16(), x, weight, kernels=1, **tolerance)


def test_gathered_rows_are_a_kernel_before_the_product():
    table, index, weight = torch.randn(50, 16), torch.randint(0, 50, (20,)), torch.randn(16, 24)
    check(lambda t, i, w: t[i] @ w, table, index, weight, kernels=2)


def test_a_batch_whose_factor_is_broadcast_is_not_copied():
    a, b = torch.randn(4, 10, 16), torch.randn(16, 12)
    check(lambda a, b: torch.bmm(a, b.expand(4, 16, 12)) * 2, a, b, kernels=1)


def test_transposed_factors_and_results_are_one_kernel():
    a, b = torch.randn(24, 20), torch.randn(30, 24)
    check(lambda a, b: (a.T @ b.T).T.contiguous(), a, b, kernels=1)


def test_addmm_with_beta_0_does_not_read_the_added_tensor():
    added = torch.full((8, 10), torch.nan)
    a, b = torch.randn(8, 16), torch.randn(16, 10)
    check(lambda c, a, b: torch.addmm(c, a, b, beta=0, alpha=0.5), added, a, b, kernels=1)
    check(lambda c, a, b: torch.addmm(c, a, b, beta=2.0), torch.randn(10), a, b, kernels=1)


def test_two_products_of_one_input_stay_two_kernels():
    x, a, b = torch.randn(16, 24), torch.randn(24, 20), torch.randn(24, 20)
    check(lambda x, a, b: x @ a + x @ b, x, a, b, kernels=2)


def test_a_norm_after_a_product_is_a_separate_kernel():
    x, weight = torch.randn(16, 24), torch.randn(24, 20)
    check(lambda x, w: F.rms_norm(x @ w, (20,)), x, weight, kernels=2)


def test_a_product_that_tensor_cores_do_not_support_is_a_library_call():
    a, b = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, 8, dtype=torch.float64)
    before = counted("externs")
    torch.testing.assert_close(compiled(torch.mm, matmul="native")(a, b), a @ b)
    assert counted("externs") == before + 1


def test_gradients_of_a_small_network_equal_eager():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.GELU(), torch.nn.Linear(40, 8))
    x = torch.randn(5, 6, 24)
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    found = torch.autograd.grad(compiled(model, matmul="native")(x).square().mean(), list(model.parameters()))
    torch.testing.assert_close(found, expected)


def test_a_product_of_constants_reads_nothing():
    def function(x):
        twos = torch.full((4, 8), 2.0)
        return torch.addmm(twos @ twos.t(), twos, twos.t(), beta=0.5) * x

    torch.testing.assert_close(compiled(function, matmul="native")(torch.arange(4.0)), function(torch.arange(4.0)))
