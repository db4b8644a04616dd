"""Pairs of accesses to elements that alternate in memory: interleaved gate and up, the parts of a complex number.

    a = load x[2*p0];  b = load x[2*p0 + 1]

One contiguous access loads a tile of twice the length, which is then split into the two. Two strided accesses would
each use only half of every cache sector that they read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import sympy

from overlapc.ir.body import Load, Loop, Store
from overlapc.ir.indexing import exact_quotient, free_symbols

Access = TypeVar("Access", Load, Store)


@dataclass(frozen=True)
class Pair(Generic[Access]):
    """Two accesses to adjacent elements; the next pair along `axis` is adjacent to them."""

    even: Access
    odd: Access
    axis: str


def paired(accesses: Iterable[Access], axes: Mapping[str, tuple[Loop, ...]]) -> dict[Access, Pair[Access]]:
    """Return the pairs among `accesses`; each pair is listed under both of its accesses."""
    plain = {
        (access.buffer, access.index): access for access in accesses if access.mask is None and not access.indirect
    }
    found: dict[Access, Pair[Access]] = {}
    for (buffer, index), even in plain.items():
        odd = plain.get((buffer, sympy.expand(index + 1)))
        axis = _stride_2_axis(index, axes) if odd is not None else None
        if odd is not None and axis is not None:
            found[even] = found[odd] = Pair(even, odd, axis)
    return found


def _stride_2_axis(index: sympy.Expr, axes: Mapping[str, tuple[Loop, ...]]) -> str | None:
    """Return the axis whose innermost loop has stride 2 in `index`, if `index` is always even, else None."""
    if any(exact_quotient(term, sympy.Integer(2)) is None for term in sympy.Add.make_args(sympy.expand(index))):
        return None
    for axis, loops in axes.items():
        if loops and index.coeff(loops[-1].symbol) == 2:
            rest = sympy.expand(index - 2 * loops[-1].symbol)
            return None if loops[-1].symbol in free_symbols((rest,)) else axis
    return None
