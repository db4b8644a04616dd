"""Products with tensors that autograd knows to be zero stay zero, also where the other factor is infinite or NaN."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.func import grad, vmap

import overlapc  # noqa: F401 - registers the backend

SPECIAL = torch.tensor([[1.0, math.inf, 2.0], [math.nan, -3.0, 0.0], [4.0, -math.inf, -0.0]])

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "product": lambda x: x * SPECIAL,
    "product with a column": lambda x: x * SPECIAL[:, :1],
    "product with a number": lambda x: x * math.inf,
    "quotient": lambda x: x / SPECIAL,
    "quotient by a number": lambda x: x / 0.0,
    "variance": lambda x: x.var(1),  # a random program's (seed 531122)
    "two products": lambda x: x * SPECIAL * SPECIAL.T,
    "norm": lambda x: x.norm(dim=1),
    "sum of two": lambda x: x * SPECIAL + x / SPECIAL,
}


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_gradient_through_a_sign_adds_nothing(name: str, dynamic: bool) -> None:
    """The gradient of `abs` is a sign, whose gradient autograd knows to be zero."""

    def program(x: Tensor) -> Tensor:
        signs = vmap(grad(lambda row: row.abs().sum()))(PROGRAMS[name](x))
        return signs.sum() + (x * x).sum()

    x = SPECIAL if name == "variance" else SPECIAL.nan_to_num(0.5, 3.0, -3.0)
    ours, eager = (x.clone().requires_grad_() for _ in range(2))
    program(eager).backward()
    torch.compile(program, backend="overlapc", dynamic=dynamic)(ours).backward()
    assert eager.grad is not None
    assert torch.equal(eager.grad.isnan(), eager.isnan())
    torch.testing.assert_close(ours.grad, eager.grad, rtol=0, atol=0, equal_nan=True)
