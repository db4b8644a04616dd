"""Decompositions of torch's operators have the values, dtypes and strides of the operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapc.backend import overlapc
from overlapc.runtime.counters import counted

NORMS: dict[str, Callable[..., Tensor]] = {
    "group_norm": lambda x, w, b: F.group_norm(x, 2, w, b),
    "instance_norm": lambda x, w, b: F.instance_norm(x, None, None, w, b),
    "layer_norm": lambda x, w, b: F.layer_norm(x.transpose(1, 2), (6,), w, b),
    "batch_norm": lambda x, w, b: F.batch_norm(x, torch.zeros(6), torch.ones(6), w, b, training=True),
}


def gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    given = [each.clone().requires_grad_() for each in inputs]
    result = function(*given)
    generator = torch.Generator().manual_seed(3)
    tangent = torch.randn(result.shape, generator=generator, dtype=torch.float64).bfloat16()
    return [result, *torch.autograd.grad(result, given, tangent.to(result.dtype))]


@pytest.mark.parametrize("name", NORMS)
def test_gradients_of_float32_parameters_with_bfloat16_inputs_are_not_rounded_to_bfloat16(name: str) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 6, 64).bfloat16(), torch.randn(6), torch.randn(6)
    true = gradients(NORMS[name], x.float(), w, b)
    torch._dynamo.reset()
    found = gradients(torch.compile(NORMS[name], backend=overlapc), x, w, b)
    assert [each.dtype for each in found] == [torch.bfloat16, torch.bfloat16, torch.float32, torch.float32]
    for of_parameter, expected in zip(found[2:], true[2:], strict=True):
        assert (of_parameter - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.parametrize("op", ["native_layer_norm", "native_group_norm", "native_batch_norm"])
def test_norms_of_bfloat16_inputs_with_float32_parameters_return_float32_statistics(op: str) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(4, 6, 8).bfloat16(), torch.randn(6), torch.randn(6)
    calls: dict[str, Callable[..., Any]] = {
        "native_layer_norm": lambda x: torch.native_layer_norm(x.transpose(1, 2), [6], w, b, 1e-5),
        "native_group_norm": lambda x: torch.native_group_norm(x, w, b, 4, 6, 8, 2, 1e-5),
        "native_batch_norm": lambda x: torch.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5),
    }
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(calls[op], backend=overlapc)(x), calls[op](x))


def put(index: Callable[[Tensor], Any], accumulate: bool = False) -> Callable[[Tensor, Tensor], Tensor]:
    """Return a function that replaces, or adds to, the elements that `index` chooses."""
    return lambda x, value: torch.ops.aten.index_put.default(x.sin(), index(x), value, accumulate)


ROW = torch.tensor([1.0, 2.0, 3.0])
BY_MASK: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], Tensor]] = {
    "a number": (put(lambda x: (x > 0,)), torch.tensor(2.0)),
    "a number added": (put(lambda x: (x > 0,), accumulate=True), torch.tensor(2.0)),
    "a number in rows": (put(lambda x: (x[:, 0, 0] > 0,)), torch.tensor(2.0)),
    "a number in columns": (put(lambda x: (None, x[0] > 0)), torch.tensor(2.0)),
    "a number in the middle": (put(lambda x: (None, x[0, :, 0] > 0)), torch.tensor(2.0)),
    "a row": (put(lambda x: (x[..., 0] > 0,)), ROW),
    "a row in a dim of size 1": (put(lambda x: (x[..., 0] > 0,)), ROW[None]),
    "a row for the first dim": (put(lambda x: (None, None, x[0, 0] > 0)), torch.randn(4, 5, 1)),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("name", BY_MASK)
def test_putting_the_same_at_all_places_of_a_mask_is_no_call(name: str, transposed: bool) -> None:
    function, value = BY_MASK[name]
    torch.manual_seed(0)
    x = torch.randn(3, 5, 4).transpose(0, 2) if transposed else torch.randn(4, 5, 3)
    tangent = torch.randn(4, 5, 3)

    def results(run: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        given = x.detach().requires_grad_()
        result = run(given, value)
        return [result.detach(), *torch.autograd.grad(result, given, tangent)]

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    wanted, found = results(function), results(torch.compile(function, backend=overlapc, fullgraph=True))
    torch.testing.assert_close(found, wanted)
    assert found[0].stride() == wanted[0].stride()
    assert not counted("fallbacks")


def test_putting_other_elements_at_each_place_of_a_mask_stays_one_call() -> None:
    def function(x: Tensor, values: Tensor) -> Tensor:
        return x.sin().index_put((x > 0,), values)

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    given = torch.tensor([1.0, -1.0, 2.0]), torch.tensor([5.0, 6.0])
    torch.testing.assert_close(torch.compile(function, backend=overlapc)(*given), function(*given))
    assert counted("fallback index_put") == 1


@pytest.mark.parametrize("spatial", [(), (2,)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_an_infinite_weight_of_a_class_that_does_not_occur_leaves_the_gradient_finite(
    reduction: str, spatial: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4, *spatial, requires_grad=True)
    target = torch.tensor([0, 1, -100]).view(3, *(1,) * len(spatial)).expand(3, *spatial)
    weight = torch.tensor([0.5, 1.0, torch.inf, torch.inf])

    def step(function: Callable[..., Tensor]) -> Tensor:
        loss = function(x, target, weight, reduction=reduction)
        return torch.autograd.grad(loss, x, torch.full_like(loss, 2.0))[0]

    torch._dynamo.reset()
    torch.testing.assert_close(step(torch.compile(F.cross_entropy, backend=overlapc)), step(F.cross_entropy))


def test_an_infinite_gradient_of_a_loss_reaches_only_the_targets() -> None:
    def loss(x: Tensor) -> Tensor:
        return F.nll_loss(x, torch.tensor([2, 0])) * torch.inf

    x = torch.ones(2, 3, requires_grad=True)
    torch._dynamo.reset()
    (found,) = torch.autograd.grad(torch.compile(loss, backend=overlapc)(x), x)
    assert torch.equal(found, torch.autograd.grad(loss(x), x)[0])
