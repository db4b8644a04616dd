"""`as_strided` of a tensor whose memory is larger than its elements: eager copies the rest of the memory, too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from overlapc.runtime.counters import counted


def scattered(x: Tensor, part: Tensor, offset: int) -> Tensor:
    return torch.slice_scatter(x[1:3, 2:5], part, 0, 0, 1).as_strided((3,), (1,), offset) + 1


def selected(x: Tensor, part: Tensor, offset: int) -> Tensor:
    return torch.select_scatter(x[1:3, 2:5], part[0], 0, 1).t()[1:].as_strided((2, 2), (2, 1), offset) * 2


def without_offset(x: Tensor, part: Tensor, offset: int) -> Tensor:
    return torch.slice_scatter(x[1:3, 2:5], part, 0, 0, 1).as_strided((9,), (1,)) + offset


@pytest.mark.parametrize("offset", [0, 3, 8, 10, 16])
@pytest.mark.parametrize("function", [scattered, selected, without_offset])
def test_as_strided_reads_memory_around_a_scattered_part_as_in_eager(
    function: Callable[..., Tensor], offset: int, fresh_dynamo: None
) -> None:
    inputs = torch.arange(24.0).reshape(4, 6).requires_grad_(), torch.full((1, 3), 100.0)
    step = torch.compile(function, backend="overlapc", dynamic=False)
    with pytest.warns(UserWarning, match="runs a graph op by op: as_strided.* may read memory of .*_scatter"):
        result = step(*inputs, offset)
    expected = function(*inputs, offset)
    torch.testing.assert_close(result, expected)


def test_as_strided_of_a_scattered_whole_tensor_is_compiled(fresh_dynamo: None) -> None:
    def function(x: Tensor, part: Tensor) -> Tensor:
        return torch.slice_scatter(x, part, 0, 0, 1).as_strided((3,), (2,), 4).sin()

    inputs = torch.arange(24.0).reshape(4, 6), torch.full((1, 6), 100.0)
    before = counted("graphs_run_op_by_op")
    torch.testing.assert_close(torch.compile(function, backend="overlapc")(*inputs), function(*inputs))
    assert counted("graphs_run_op_by_op") == before
