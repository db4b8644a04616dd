"""One launch for many collectives: the payload of a bucket.

`_c10d_functional` has a coalesced form of each collective that takes and gives lists of tensors: one NCCL group
launch over the tensors where they lie. Gloo runs them one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from overlapc.ir.ops import Extern, Start, View

_c10d = torch.ops._c10d_functional
_COALESCED: dict[Any, Any] = {
    getattr(_c10d, name).default: getattr(_c10d, f"{name}_coalesced").default
    for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")
}


def merge_starts(starts: Sequence[Start]) -> Start | str:
    """One start that launches what `starts` do, in their order, and defines what they do; or why it cannot be.

    Coalesced starts may be merged once more. All have to agree in everything but their tensors.
    """
    targets = {_coalesced(start.call.target) for start in starts}
    target = targets.pop()
    if targets or target is None:
        return f"no coalesced form of {starts[0].call.target}"
    first = starts[0]
    rest = first.call.args[1:]  # reduction, group size, group
    if any(start.call.args[1:] != rest or start.call.kwargs != first.call.kwargs for start in starts):
        return "reductions or process groups differ"
    inputs = [view for start in starts for view in _as_list(start.call.args[0])]
    results = [view for start in starts for view in _as_list(start.call.result)]
    if not all(isinstance(view, View) for view in (*inputs, *results)):
        return "not all are tensors"
    if len({view.layout.dtype for view in inputs}) > 1:
        return "dtypes differ"
    origin = first.origin
    for start in starts[1:]:
        origin = origin.joined(start.origin)
    name = f"{first.name}+{len(starts) - 1}"
    call = Extern(name, target, (inputs, *rest), dict(first.call.kwargs), results, origin=origin, pure=False)
    return Start(name, call, first.comm, origin)


def _coalesced(target: Any) -> Any:
    return target if target in _COALESCED.values() else _COALESCED.get(target)


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]
