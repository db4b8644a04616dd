"""Operators whose result has the dtype of their first argument instead of the promoted dtype of all arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapc.backend import overlapc

ROWS = torch.tensor([2, 0])
TWICE = torch.tensor([1, 1])
INDEX = torch.tensor([[0, 2, 1], [1, 0, 2]])
MASK = torch.tensor([[True, False, True], [False, True, True], [True, True, False], [False, False, False]])


def assigned(x: Tensor, source: Tensor) -> Tensor:
    x = x.clone()
    x[1:3] = source[:2]
    x[0] = source[0, 0]
    x[3, 1] = 2.7
    return x


# Functions of (x, source), both 4 x 3. A test skips the operators that eager refuses for its pair of dtypes.
OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "select_scatter": lambda x, s: torch.select_scatter(x, s[0], 0, 1),
    "slice_scatter": lambda x, s: torch.slice_scatter(x, s[:2], 0, 0, 4, 2),
    "diagonal_scatter": lambda x, s: torch.diagonal_scatter(x, s.diagonal()),
    "as_strided_scatter": lambda x, s: torch.as_strided_scatter(x, s[:2], (2, 3), (3, 1), 3),
    "index_put": lambda x, s: torch.index_put(x, (ROWS,), s[:2]),
    "index_put, a number at a mask": lambda x, s: torch.index_put(x, (MASK,), s[0, 0]),
    "index_put, added": lambda x, s: torch.index_put(x, (TWICE,), s[:2], accumulate=True),
    "index_copy": lambda x, s: torch.index_copy(x, 0, ROWS, s[:2]),
    "index_add": lambda x, s: torch.index_add(x, 0, ROWS, s[:2]),
    "index_fill": lambda x, s: torch.index_fill(x, 0, ROWS, s[0, 0]),
    "index_fill, a number": lambda x, s: torch.index_fill(x, 0, ROWS, 2.7),
    "masked_fill": lambda x, s: torch.masked_fill(x, MASK, s[0, 0]),
    "masked_fill, a number": lambda x, s: torch.masked_fill(x, MASK, 2.7),
    "masked_scatter": lambda x, s: torch.masked_scatter(x, MASK, s),
    "scatter": lambda x, s: torch.scatter(x, 0, INDEX, s),
    "scatter, a number": lambda x, s: torch.scatter(x, 0, INDEX, 2.7),
    "scatter_add": lambda x, s: torch.scatter_add(x, 0, INDEX, s),
    "scatter_reduce": lambda x, s: torch.scatter_reduce(x, 0, INDEX, s, "amax"),
    "copy": lambda x, s: torch.ops.aten.copy(x, s),
    "fill": lambda x, s: torch.fill(x, s[0, 0]),
    "fill, a number": lambda x, s: torch.fill(x, 2.7),
    "lerp": lambda x, s: torch.lerp(x, s, 0.3),
    "huber_loss": lambda x, s: F.huber_loss(x, s),
    "soft_margin_loss": lambda x, s: F.soft_margin_loss(x, s),
    "add_": lambda x, s: x.clone().add_(s),
    "mul_": lambda x, s: x.clone().mul_(s),
    "copy_": lambda x, s: x.clone().copy_(s),
    "clamp_": lambda x, s: x.clone().clamp_(s, s),
    "lt_": lambda x, s: x.clone().lt_(s),
    "index_put_": lambda x, s: x.clone().index_put_((ROWS,), s[:2]),
    "masked_fill_": lambda x, s: x.clone().masked_fill_(MASK, s[0, 0]),
    "masked_scatter_": lambda x, s: x.clone().masked_scatter_(MASK, s),
    "assignments": assigned,
}


def accepted(x: Tensor, source: Tensor) -> dict[str, Tensor]:
    found = {}
    for name, function in OPERATORS.items():
        try:
            found[name] = function(x, source)
        except RuntimeError:  # eager requires equal dtypes
            continue
    return found


@pytest.mark.parametrize(
    ("dtype", "other"),
    [(torch.int64, torch.float32), (torch.bool, torch.int64), (torch.float32, torch.float64)],
    ids=["int64 from float32", "bool from int64", "float32 from float64"],
)
def test_operators_keep_the_dtype_of_their_first_argument(dtype: torch.dtype, other: torch.dtype) -> None:
    numbers = torch.linspace(-9.7, 8.9, 12, dtype=torch.float64).view(4, 3)
    x, source = (numbers > 1 if dtype is torch.bool else numbers.to(dtype)), (numbers.flip(0) * 1.3).to(other)
    expected = accepted(x, source)
    assert {"select_scatter", "slice_scatter", "diagonal_scatter", "copy_", "assignments"} <= expected.keys()

    def all_of_them(x: Tensor, source: Tensor) -> dict[str, Tensor]:
        return {name: OPERATORS[name](x, source) for name in expected}

    torch._dynamo.reset()
    found = torch.compile(all_of_them, backend=overlapc)(x, source)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["index_put", "index_put, added", "index_copy", "index_add"])
def test_values_of_another_dtype_are_an_error_as_in_eager(name: str) -> None:
    x, source = torch.zeros(4, 3, dtype=torch.int64), torch.ones(4, 3)
    torch._dynamo.reset()
    for call in (OPERATORS[name], torch.compile(OPERATORS[name], backend=overlapc)):
        with pytest.raises(RuntimeError, match=r"dtype|scalar type"):
            call(x, source)
