"""Merges several collectives into one launch, the payload of a bucket.

`_c10d_functional` has a coalesced form of each collective that takes and returns lists of tensors. NCCL launches it as
one group over the tensors in place, without packing them; gloo runs the collectives one after another.

Tensors of one bucket may differ in dtype: reduce-scatters pass each tensor with its own dtype, as NCCL allows, and
all-gathers transfer bytes. All-reduces of one bucket need the same dtype: c10d's coalesced all-reduce refuses mixed
lists, over NCCL and over gloo (torch 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from overlapc.ir.ops import Extern, Start, View
from overlapc.runtime.collective_ops import all_gather_bytes_coalesced
from overlapc.schedule.collective_kinds import COPY, KINDS

_c10d = torch.ops._c10d_functional
_NAMES = tuple(kind.op for kind in KINDS.values() if kind.coalesced)
_ONE_DTYPE = tuple(kind.op for kind in KINDS.values() if not kind.mixed_dtypes)
_NAME_OF: dict[Any, str] = {
    **{getattr(_c10d, name).default: name for name in _NAMES},
    **{getattr(_c10d, f"{name}_coalesced").default: name for name in _NAMES},
    all_gather_bytes_coalesced: "all_gather_into_tensor",
}


def merge_starts(starts: Sequence[Start]) -> Start | str:
    """Return one start that launches the collectives of `starts`, in order, with all their outputs.

    Return the reason as a string if they cannot be merged: all starts must be equal except for their tensors. Starts
    that are already coalesced may be merged again.
    """
    first = starts[0]
    rest = first.call.args[1:]  # reduction, group size, group
    inputs = [view for start in starts for view in _as_list(start.call.args[0])]
    results = [view for start in starts for view in _as_list(start.call.result)]
    if not all(isinstance(view, View) for view in (*inputs, *results)):
        return "an input or result is not a tensor"
    by_copies = first.comm.via == COPY
    targets = {start.call.target for start in starts}
    names = {_NAME_OF.get(target, "") for target in targets}
    name = min(names)
    if not by_copies and (len(names) > 1 or not name):
        return f"no coalesced form of {first.call.target}"
    if by_copies and len(targets) > 1:
        return "ops differ"
    if any(start.call.args[1:] != rest or start.call.kwargs != first.call.kwargs for start in starts):
        return "reductions, blocks or process groups differ"
    if by_copies:  # `codegen.program_builder` replaces the op by copies, which take any list of tensors
        return _merged(starts, first.call.target, (inputs, *rest), results)
    target = getattr(_c10d, f"{name}_coalesced").default
    if len({view.layout.dtype for view in inputs}) > 1:
        if name in _ONE_DTYPE:
            return "dtypes differ"
        if name == "all_gather_into_tensor":
            target = all_gather_bytes_coalesced
    return _merged(starts, target, (inputs, *rest), results)


def _merged(starts: Sequence[Start], target: Any, args: tuple[Any, ...], results: list[View]) -> Start:
    first = starts[0]
    origin = first.origin
    for start in starts[1:]:
        origin = origin.joined(start.origin)
    bucket = f"{first.name}+{len(starts) - 1}"
    call = Extern(bucket, target, args, dict(first.call.kwargs), results, origin=origin, pure=False)
    return Start(bucket, call, first.comm, origin)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
