"""Check the values that kernels write, and find the kernel that failed (`check_values`, `sync_kernels`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from overlapc.errors import OverlapcError

_KINDS = {"nan": torch.isnan, "inf": torch.isinf}


class ValueCheckError(OverlapcError):
    """A node of a compiled graph wrote a value that `check_values` looks for."""


class KernelFailed(OverlapcError):
    """The device reported an error while a node of a compiled graph ran (`sync_kernels`)."""


def check(node: str, origin: str, kinds: tuple[str, ...], **written: Any) -> None:
    """Raise ValueCheckError if a floating-point tensor of `written` holds one of `kinds` ("nan", "inf").

    Waits for the device.
    """
    for name, tensor in written.items():
        if not isinstance(tensor, Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
            continue
        for kind in kinds:
            count = int(_KINDS[kind](tensor).sum())
            if count:
                raise ValueCheckError(
                    f"{node} wrote {count} {kind} of {tensor.numel()} values to {name} {tuple(tensor.shape)}"
                    f"\n   at {origin}"
                    "\nhint: OVERLAPC_DUMP=kernels,program shows the kernel and its inputs;"
                    ' options={"native": False} calls the library op of every node'
                )


def synchronize(node: str, origin: str) -> None:
    """Wait for everything launched so far; raise KernelFailed with the node's name if the device reports an error."""
    if not torch.cuda.is_available():
        return
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise KernelFailed(f"{node} failed on the device: {error}\n   at {origin}") from error
