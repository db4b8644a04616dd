"""Tensors wrapped by torch.func: the example values of a graph where Dynamo traced through a transform."""

from __future__ import annotations

import torch
from torch import Tensor


def storage_of(value: Tensor) -> torch.UntypedStorage:
    """Return the storage of a strided tensor; for one wrapped by torch.func, which has none, the inner tensor's."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value.untyped_storage()
