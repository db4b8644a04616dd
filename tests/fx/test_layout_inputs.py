"""Inputs that only tell how other inputs lie in memory are removed from the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from overlapc.fx.captured.layout_inputs import without_layout_inputs

PARTS = {"rows": torch.randn(3, 5, 7)[1], "columns": torch.randn(5, 19)[:, 4:11]}


def sliced(x: Tensor) -> Tensor:
    return x[1:].sin() + x.shape[0]


def captured(function: Callable[..., Any], *inputs: Tensor) -> tuple[GraphModule, GraphModule, list[str], list[str]]:
    """Return Dynamo's graph and that without inputs, and the kinds of their inputs."""
    found = []

    def look(gm: GraphModule, examples: list[Any]) -> GraphModule:
        less, rest = without_layout_inputs(gm)
        kinds = [type(each).__name__ for each in examples]
        found.append((gm, less, kinds, [kinds[at] for at in rest]))
        return gm

    torch._dynamo.reset()
    torch.compile(function, backend=look, fullgraph=True, dynamic=True)(*inputs)
    return found[0]


@pytest.mark.parametrize("part", PARTS)
def test_a_part_of_a_tensor_has_the_same_inputs_as_a_whole_tensor(part: str):
    *_, whole = captured(sliced, torch.randn(5, 7))
    gm, less, kinds, rest = captured(sliced, PARTS[part])
    assert len(gm.graph.find_nodes(op="placeholder")) == len(kinds) > len(rest)
    assert rest == whole == ["SymInt", "SymInt", "Tensor"]
    torch.testing.assert_close(less(5, 7, PARTS[part]), (sliced(PARTS[part]),))


def test_strides_that_are_read_and_offsets_that_equal_sizes_stay_inputs():
    def scaled(x: Tensor) -> Tensor:
        return x * x.stride(0)

    gm, less, kinds, rest = captured(scaled, torch.randn(5, 19)[:, 5:12])
    assert less is gm
    assert rest == kinds == ["SymInt", "SymInt", "SymInt", "Tensor"]
