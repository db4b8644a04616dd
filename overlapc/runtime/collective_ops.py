"""Collectives for which torch has no op, or no safe op.

gloo runs a process group's collectives on two threads. When a collective is done, its thread stores the operation's
name in a string of the group, without a lock (`ProcessGroupGloo::runLoop`, torch 2.11 to 2.13). Names of up to 15
letters are stored within the string object. `_c10d_functional`'s gathers run as ALLGATHER_COALESCED, whose 19 letters
need allocated memory: two threads that finish collectives at the same time free it twice or write to it after it is
freed, and the process dies of "malloc(): unaligned tcache chunk detected" much later. `all_gather_into_tensor_out` runs
as ALLGATHER. With gloo on GPU tensors, ALLGATHER_COALESCED also reads device addresses on the host, and the process
dies of SIGSEGV; ALLGATHER copies the tensors to the host first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_c10d = torch.ops._c10d_functional


def backend_of(group_name: str, device_type: str) -> str:
    """Return a group's backend for a device type, such as `gloo` or `nccl`; "" if it has none or was destroyed."""
    from torch.distributed.distributed_c10d import _resolve_process_group

    try:
        return str(_resolve_process_group(group_name)._get_backend(torch.device(device_type)).name())  # type: ignore[arg-type]
    except RuntimeError:  # torch has no other way to ask
        return ""


def wait_for(tensor: Tensor, *held: Tensor) -> None:
    """Wait for the collective that fills `tensor`; it may read the other arguments, which live until it is done."""
    _c10d.wait_tensor(tensor)


def all_gather_bytes_coalesced(inputs: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    """Gather tensors of several dtypes along dim 0 in one launch; the results have to be waited for, as torch's do.

    The tensors are gathered as bytes: NCCL takes several dtypes in one launch, but gloo's coalesced gather reads all
    tensors as the first one's dtype (torch 2.13).
    """
    # The view as bytes multiplies the last dim, which for a tensor of one dim is dim 0; so put a new dim in front.
    given = [tensor.unsqueeze(0).view(torch.uint8) for tensor in inputs]
    gathered = _c10d.all_gather_into_tensor_coalesced(given, group_size, group_name)
    return [
        each.view(tensor.dtype).flatten(0, 1) if tensor.dim() else each.view(tensor.dtype)
        for each, tensor in zip(gathered, inputs, strict=True)
    ]


def gloo_all_gather(tensor: Tensor, group_size: int, group_name: str) -> Tensor:
    """`all_gather_into_tensor` over gloo, as an operation whose name is short enough for its threads."""
    part = tensor if tensor.dim() else tensor.view(1)
    if part.is_complex():  # which gloo does not know
        return torch.view_as_complex(gloo_all_gather(torch.view_as_real(part.resolve_conj()), group_size, group_name))
    whole = part.new_empty((group_size * part.shape[0], *part.shape[1:]))
    gathered: Tensor = _c10d.all_gather_into_tensor_out(part, group_size, group_name, out=whole)
    return gathered


def gloo_all_gathers(inputs: Sequence[Tensor], group_size: int, group_name: str) -> list[Tensor]:
    """`all_gather_into_tensor_coalesced` over gloo, for any dtypes: gathers each tensor by itself."""
    return [gloo_all_gather(tensor, group_size, group_name) for tensor in inputs]


def gloo_all_reduces(inputs: Sequence[Tensor], reduce_op: str, group_name: str) -> list[Tensor]:
    """`all_reduce_coalesced` over gloo on GPU tensors, which torch refuses: reduces each tensor by itself."""
    return [_c10d.all_reduce(tensor, reduce_op, group_name) for tensor in inputs]


SAFE_OVER_GLOO: Mapping[Any, Callable[..., Any]] = {
    _c10d.all_gather_into_tensor.default: gloo_all_gather,
    _c10d.all_gather_into_tensor_coalesced.default: gloo_all_gathers,
    all_gather_bytes_coalesced: gloo_all_gathers,
}
"""Maps an op that starts a collective to its replacement in programs over gloo."""

SAFE_OVER_GLOO_ON_GPUS = {**SAFE_OVER_GLOO, _c10d.all_reduce_coalesced.default: gloo_all_reduces}
"""The same for tensors of a GPU."""

WAITED_ONE_BY_ONE = (gloo_all_gathers, gloo_all_reduces)
"""The functions whose results are waited for one by one."""
