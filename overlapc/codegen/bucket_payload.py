"""One launch for many collectives: the payload of a bucket.

`_c10d_functional` has a coalesced form of each collective that takes and gives lists of tensors: one NCCL group
launch over the tensors where they lie. Gloo runs them one after the other.

Of several dtypes, reduce-scatters each keep their own (NCCL takes a dtype a tensor), and gathers go as bytes.
All-reduces have to agree: c10d's coalesced one refuses other lists, over NCCL and over gloo (torch 2.11 to 2.13).
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
    """One start that launches the collectives of `starts`, in order, with all outputs; or why there is none.

    Coalesced starts may be merged again. All starts must be equal but for their tensors.
    """
    first = starts[0]
    rest = first.call.args[1:]  # reduction, group size, group
    inputs = [view for start in starts for view in _as_list(start.call.args[0])]
    results = [view for start in starts for view in _as_list(start.call.result)]
    if not all(isinstance(view, View) for view in (*inputs, *results)):
        return "not all are tensors"
    if (
        first.comm.via == COPY
    ):  # `codegen.program_builder` replaces the op by a function that runs copies of any tensors
        if any(start.call.target is not first.call.target for start in starts):
            return "ops differ"
        return _merged(starts, first.call.target, (inputs, *rest), results)
    names = {_NAME_OF.get(start.call.target, "") for start in starts}
    name = names.pop()
    if names or not name:
        return f"no coalesced form of {first.call.target}"
    if any(start.call.args[1:] != rest or start.call.kwargs != first.call.kwargs for start in starts):
        return "reductions or process groups differ"
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
