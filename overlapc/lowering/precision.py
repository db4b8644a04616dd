"""Marks values that may be computed with an error of a few units in the last place.

A float32 value that reaches memory only in a 16-bit format, through element-wise operations, is rounded to 11 bits or
fewer there, which hides an error in its 22nd bit. (In float8 it would show: numbers scaled into its range are half way
between two float8 numbers, a tenth apart, once in a few hundred times.) For such values division, exponential, tanh and
erf may use the device's approximations; values on which a float32 result, a comparison or an index depends stay exact.

This is decided when an op is lowered, so that later fusions change no bits. A float32 result of a node may be coarse as
well, if `fx/precision.py` found that it ends in low precision in the whole step.
"""

from __future__ import annotations

import dataclasses

import torch

from overlapc.ir.body import Body, Cast, Op, Reduce, Store, Value
from overlapc.ir.rewriting import rewrite

# Operations that pass on a relative error about unchanged. Differences may enlarge it, as they do eager's own rounding.
_PASSES_ON = frozenset("add sub mul div neg maximum minimum relu abs sigmoid tanh erf where".split())
FORGIVING = (torch.float16, torch.bfloat16)
APPROXIMATED = frozenset(("div", "exp", "sigmoid", "tanh", "erf"))


def coarsened(body: Body, results_are_coarse: bool = False) -> Body:
    """Return `body` with operations marked as coarse where they may be; the same object if there are none."""
    coarse = {
        value
        for value in coarse_values(body, results_are_coarse)
        if isinstance(value, Op) and value.name in APPROXIMATED
    }
    if not coarse:
        return body
    # Rewriting creates new values, so marks are matched by position; both bodies list their values in the same order.
    marks = iter([value in coarse for value in body.values()])

    def replace(built: Value) -> Value | None:
        return dataclasses.replace(built, coarse=True) if next(marks) and isinstance(built, Op) else None

    return rewrite(body, body.loops, body.reduction, replace=replace)


def coarse_values(body: Body, results_are_coarse: bool = False) -> frozenset[Value]:
    """Return the float32 values all of whose uses end in a 16-bit format, or in results if `results_are_coarse`."""
    exact: set[Value] = set()
    for store in body.stores:
        if not _forgives(store, results_are_coarse):
            exact.add(store.value)
        exact.update(operand for operand in store.operands() if operand is not store.value)
    for value in reversed(body.values()):  # users before operands
        if isinstance(value, Reduce):
            if value in exact or value.kind not in ("sum", "max", "min"):
                exact.add(value.arg)
        elif isinstance(value, Cast):
            if value.to not in FORGIVING:
                exact.update(value.operands())
        elif not isinstance(value, Op) or value.name not in _PASSES_ON or value in exact:
            exact.update(value.operands())
    return frozenset(value for value in body.values() if value.dtype is torch.float32 and value not in exact)


def _forgives(store: Store, results_are_coarse: bool) -> bool:
    if store.mode != "set":
        return False
    return store.memory_dtype in FORGIVING or (results_are_coarse and store.memory_dtype is torch.float32)
