"""Tensors that torch.func wraps: what a graph's example values are where Dynamo traced through a transform."""

from __future__ import annotations

import torch
from torch import Tensor


def storage_of(value: Tensor) -> torch.UntypedStorage:
    """The memory of a strided tensor; of one that torch.func wrapped, that of the tensor within, as it has none."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value.untyped_storage()
