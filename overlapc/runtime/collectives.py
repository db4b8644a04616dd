"""Collectives that torch has no op for."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_c10d = torch.ops._c10d_functional


def all_gather_bytes_coalesced(inputs: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    """One launch that gathers tensors of several dtypes, each along dim 0; to be waited for like torch's own.

    A gather moves bytes, whatever they mean. NCCL takes several dtypes in one launch, but gloo's coalesced gather reads
    all tensors as the first one's dtype (torch 2.13).
    """
    # A new dim in front, as bytes replace the last one, and with one dim that is the one gathered along.
    given = [tensor.unsqueeze(0).view(torch.uint8) for tensor in inputs]
    gathered = _c10d.all_gather_into_tensor_coalesced(given, group_size, group_name)
    return [
        each.view(tensor.dtype).flatten(0, 1) if tensor.dim() else each.view(tensor.dtype)
        for each, tensor in zip(gathered, inputs, strict=True)
    ]
