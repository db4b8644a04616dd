"""Memory of the values of a Dynamo graph: of tensors that torch.func wrapped, and of those inside DTensors."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx import Node
from torch.multiprocessing.reductions import StorageWeakRef

from overlapc.runtime.optimizer_memory import plain_tensors


def storage_of(value: Tensor) -> torch.UntypedStorage:
    """Return the storage of a strided tensor; for one wrapped by torch.func, which has none, the inner tensor's."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value.untyped_storage()


def memory_of(node: Node) -> frozenset[StorageWeakRef]:
    """Return references to the storages of the value of a node; for a DTensor, those of the tensors inside it.

    Empty for values without storage: numbers, other objects, sparse tensors.
    """
    tensors = plain_tensors([node.meta.get("example_value")])
    return frozenset(StorageWeakRef(storage_of(tensor)) for tensor in tensors)
