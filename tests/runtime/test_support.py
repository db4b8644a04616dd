"""Checking all arguments at once (`Layouts`) is as strict as checking each argument."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from overlapc.backend import overlapc as backend
from overlapc.runtime import support

SHAPE = (4, 6)


@pytest.fixture
def layouts() -> support.Layouts:
    found = support.Layouts()
    found.learn(torch.empty(SHAPE), torch.empty(6))
    return found


@pytest.mark.parametrize(
    ("first", "known"),
    [
        (torch.empty(SHAPE), True),
        (torch.empty(8, 6)[2:6], True),
        (torch.empty(6, 4).t(), False),
        (torch.empty(4, 12)[:, ::2], False),
        (torch.empty(5, 6), False),
        (torch.empty(24), False),
    ],
    ids=["new", "rows of another", "transposed", "every second column", "longer", "flat"],
)
def test_only_the_same_layout_is_known(layouts: support.Layouts, first: Tensor, known: bool):
    assert layouts.known(first, torch.empty(6)) == known
    assert not layouts.known(first, torch.empty(7))


def test_only_the_layouts_of_the_first_call_are_known():
    layouts = support.Layouts()
    assert not layouts.known(torch.empty(3))
    layouts.learn(torch.empty(3))
    layouts.learn(torch.empty(4))
    assert layouts.known(torch.empty(3))
    assert not layouts.known(torch.empty(4))


def test_layouts_hold_no_tensor():
    tensor = torch.empty(3)
    storage = weakref.ref(tensor.untyped_storage())
    layouts = support.Layouts()
    layouts.learn(tensor)
    del tensor
    assert storage() is None


def compiled_product(x: Tensor, y: Tensor) -> Any:
    """Return a compiled graph that multiplies its arguments. It is called without Dynamo, whose guards would notice
    other arguments first."""
    graphs = []

    def capture(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        graphs.append(backend(gm, inputs, options={"warm_start": False}))
        return graphs[0]

    torch._dynamo.reset()
    torch.compile(lambda x, y: x * y, backend=capture)(x, y)
    (call,) = graphs
    return call


def test_a_wrong_layout_is_an_error_after_right_ones():
    x, y = torch.randn(SHAPE), torch.randn(6)
    call = compiled_product(x, y)
    for _ in range(3):
        torch.testing.assert_close(call(x, y)[0], x * y)
    torch.testing.assert_close(call(x.clone().requires_grad_(), y)[0], x * y)
    with pytest.raises(support.LayoutError, match="size \\(6, 4\\)"):
        call(x.t().contiguous(), y)
    torch.testing.assert_close(call(x, y)[0], x * y)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("after_right_ones", [False, True])
def test_an_argument_of_another_dtype_is_converted(dtype: torch.dtype, after_right_ones: bool):
    x, y = torch.randn(SHAPE).bfloat16().float(), torch.randn(6)
    call = compiled_product(x, y)
    if after_right_ones:
        call(x, y)
    for _ in range(2):
        torch.testing.assert_close(call(x.to(dtype), y)[0], x * y)


def test_the_result_of_a_call_has_the_traced_dtype():
    given = torch.randn(3, 4)
    expected = support.as_expected("x", given, (3, 4), (1, 3), torch.float64)
    assert expected.stride() == (1, 3)
    torch.testing.assert_close(expected, given.double())
    assert support.as_expected("x", given, (3, 4), (4, 1), torch.float32) is given
