"""Which values may be computed with a few units in the last place of error.

A float32 value that reaches memory in a low-precision format only, through element-wise operations, is rounded to 11
bits or fewer there: an error in its 22nd bit is not seen. For these, division, exponential, tanh and erf take the
device's approximations; anything that a float32 result, a comparison or an index depends on stays exact.
"""

from __future__ import annotations

import torch

from overlapc.ir.body import LOW_PRECISION, Body, Cast, Op, Reduce, Value

# What hands an error on about as large as it takes it. Differences may enlarge it, as they do eager's own rounding.
_PASSES_ON = frozenset("add sub mul div neg maximum minimum relu abs sigmoid tanh erf where".split())


def coarse_values(body: Body) -> frozenset[Value]:
    """Float32 values all of whose uses end in a low-precision format."""
    exact: set[Value] = set()
    for store in body.stores:
        if store.memory_dtype not in LOW_PRECISION or store.mode != "set":
            exact.add(store.value)
        exact.update(operand for operand in store.operands() if operand is not store.value)
    for value in reversed(body.values()):  # users before operands
        if isinstance(value, Reduce):
            if value in exact or value.kind not in ("sum", "max", "min"):
                exact.add(value.arg)
        elif isinstance(value, Cast):
            if value.to not in LOW_PRECISION:
                exact.update(value.operands())
        elif not isinstance(value, Op) or value.name not in _PASSES_ON or value in exact:
            exact.update(value.operands())
    return frozenset(value for value in body.values() if value.dtype is torch.float32 and value not in exact)
