"""Numbers that a program writes as tensors: `torch.tensor(0.5)`, or the 2 in `x[0] = 2`."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


def written_number(held: Any) -> bool | int | float | complex | None:
    """Return the number in an attribute of a graph, if that is a real tensor without dims on the CPU; else None.

    It is read outside of the fake mode in which graphs are compiled, because that cannot read a real tensor.
    """
    if not isinstance(held, torch.Tensor) or isinstance(held, FakeTensor) or held.ndim or held.device.type != "cpu":
        return None
    with _disable_current_modes():
        number: bool | int | float | complex = held.item()
    return number
