"""Constants that a program writes as tensors: `torch.tensor(0.5)`, the 2 in `x[0] = 2`, or `torch.tensor([])`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


def written_number(held: Any) -> bool | int | float | complex | None:
    """Return the number in an attribute of a graph, if that is a real 0-dim CPU tensor; else None.

    It is read outside of the fake mode in which graphs are compiled, because that cannot read a real tensor.
    """
    if not isinstance(held, torch.Tensor) or isinstance(held, FakeTensor) or held.ndim or held.device.type != "cpu":
        return None
    with _disable_current_modes():
        number: bool | int | float | complex = held.item()
    return number


def fill_empty_constants(graph: fx.Graph) -> None:
    """Replace copies of constants without elements, such as `torch.tensor([])`, by calls that need no constant.

    A step that reads constants of its graph cannot be cached for other processes.
    """
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.lift_fresh_copy.default):
        constant, value = node.args[0], node.meta.get("val")
        if constant.op != "get_attr" or not isinstance(value, Tensor) or value.numel():
            continue
        with graph.inserting_before(node):
            filled = graph.call_function(
                aten.full.default,
                ([*value.shape], 0),
                {"dtype": value.dtype, "layout": torch.strided, "device": value.device, "pin_memory": False},
            )
        filled.meta = dict(node.meta)
        node.replace_all_uses_with(filled)
        graph.erase_node(node)
        if not constant.users:
            graph.erase_node(constant)
