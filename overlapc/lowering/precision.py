"""Which values may be computed with a few units in the last place of error.

A float32 value that reaches memory in a 16-bit format only, through element-wise operations, is rounded to 11 bits or
fewer there: an error in its 22nd bit is not seen. (In float8 it is: what is scaled into its range lies half way between
two of its numbers, a tenth apart, once in a few hundred times.) For these, division, exponential, tanh and erf may take
the device's approximations; anything that a float32 result, a comparison or an index depends on stays exact.

Decided once, where an op is lowered: what fusion later puts beside it changes no bits. A float32 result of a node may
be coarse as well, where `fx/precision.py` found that in the whole step it ends in low precision.
"""

from __future__ import annotations

import dataclasses

import torch

from overlapc.ir.body import Body, Cast, Op, Reduce, Store, Value
from overlapc.ir.rewriting import rewrite

# What hands an error on about as large as it takes it. Differences may enlarge it, as they do eager's own rounding.
_PASSES_ON = frozenset("add sub mul div neg maximum minimum relu abs sigmoid tanh erf where".split())
FORGIVING = (torch.float16, torch.bfloat16)
APPROXIMATED = frozenset(("div", "exp", "sigmoid", "tanh", "erf"))


def coarsened(body: Body, results_are_coarse: bool = False) -> Body:
    """`body` with operations marked as coarse where they may be; the same object if there are none."""
    coarse = {
        value
        for value in coarse_values(body, results_are_coarse)
        if isinstance(value, Op) and value.name in APPROXIMATED
    }
    if not coarse:
        return body
    # Operands change as their users do, so marks go by position in the one order that both bodies share.
    marks = iter([value in coarse for value in body.values()])

    def replace(built: Value) -> Value | None:
        return dataclasses.replace(built, coarse=True) if next(marks) and isinstance(built, Op) else None

    return rewrite(body, body.loops, body.reduction, replace=replace)


def coarse_values(body: Body, results_are_coarse: bool = False) -> frozenset[Value]:
    """Float32 values all of whose uses end in a low-precision format, or in results if these count as such."""
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
