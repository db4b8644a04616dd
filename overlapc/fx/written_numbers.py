"""Numbers that a program wrote as tensors: `torch.tensor(0.5)`, or the 2 of `x[0] = 2`."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes


def written_number(held: Any) -> bool | int | float | complex | None:
    """The number in what a graph holds, if that is a tensor on the CPU with no dims; else None.

    Graphs are compiled under a fake mode, which would refuse to read a real tensor.
    """
    if not isinstance(held, torch.Tensor) or isinstance(held, FakeTensor) or held.ndim or held.device.type != "cpu":
        return None
    with _disable_current_modes():
        number: bool | int | float | complex = held.item()
    return number
