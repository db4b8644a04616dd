"""Accesses to elements that alternate in memory: gate and up of a product, the two parts of a complex number.

    a = load x[2*p0];  b = load x[2*p0 + 1]

One access takes a tile of twice the length, in which neighbours in memory are neighbours, and the tile is taken apart
into the two. Each by itself would read a sector of the cache for every second of its elements.
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
    """Two accesses side by side; along `axis` the next two follow them."""

    even: Access
    odd: Access
    axis: str


def paired(accesses: Iterable[Access], axes: Mapping[str, tuple[Loop, ...]]) -> dict[Access, Pair[Access]]:
    """The pairs among `accesses`, by each of their two."""
    plain = {
        (access.buffer, access.index): access for access in accesses if access.mask is None and not access.indirect
    }
    found: dict[Access, Pair[Access]] = {}
    for (buffer, index), even in plain.items():
        odd = plain.get((buffer, sympy.expand(index + 1)))
        axis = _axis(index, axes) if odd is not None else None
        if odd is not None and axis is not None:
            found[even] = found[odd] = Pair(even, odd, axis)
    return found


def _axis(index: sympy.Expr, axes: Mapping[str, tuple[Loop, ...]]) -> str | None:
    """The axis whose innermost loop goes two elements further each time, where every `index` is even."""
    if any(exact_quotient(term, sympy.Integer(2)) is None for term in sympy.Add.make_args(sympy.expand(index))):
        return None
    for axis, loops in axes.items():
        if loops and index.coeff(loops[-1].symbol) == 2:
            rest = sympy.expand(index - 2 * loops[-1].symbol)
            return None if loops[-1].symbol in free_symbols((rest,)) else axis
    return None
