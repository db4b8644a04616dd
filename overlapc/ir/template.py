"""Templates of kernels that differ only in their buffers and possibly in one size, so that they can share a function.

   y[p0] = exp(a[p0]) for p0 < 4096;  z[p0] = exp(b[p0]) for p0 < 100
-> both are  b1[p0] = exp(b0[p0]) for p0 < n
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import sympy

from overlapc.ir.body import Body, Load, Loop, Store, Value
from overlapc.ir.rewriting import rewrite

SIZE = sympy.Symbol("n", integer=True, positive=True)


@dataclass(frozen=True, slots=True)
class Template:
    """A body with buffers b0, b1, …; if `size` is not None, its only loop has `SIZE` iterations."""

    body: Body
    buffers: tuple[str, ...]  # the buffers that b0, b1, … replace
    size: int | None  # the number that SIZE replaces


def with_numbered_buffers(body: Body) -> tuple[Body, tuple[str, ...]]:
    """Return `body` with buffers b0, b1, … in the order of their first use, and the buffers that these replace."""
    accesses: list[Load | Store] = [*body.loads(), *body.stores]
    buffers = tuple(dict.fromkeys(access.buffer for access in accesses))
    names = {buffer: f"b{at}" for at, buffer in enumerate(buffers)}

    def renamed(value: Value) -> Value | None:
        return dataclasses.replace(value, buffer=names[value.buffer]) if isinstance(value, Load) else None

    made = rewrite(body, body.loops, body.reduction, replace=renamed)
    stores = tuple(dataclasses.replace(store, buffer=names[store.buffer]) for store in made.stores)
    return Body(body.loops, body.reduction, stores), buffers


def template_of(body: Body) -> Template:
    """Return the template of `body`, with the buffers and the size that are its own."""
    body, buffers = with_numbered_buffers(body)
    loops, reduction, size = body.loops, body.reduction, None
    (only, *more) = (*loops, *reduction) or (None,)
    if only is not None and not more and only.size.is_Integer:
        size = int(only.size)
        loops, reduction = (tuple(Loop(loop.symbol, SIZE) for loop in nest) for nest in (loops, reduction))
    return Template(Body(loops, reduction, body.stores), buffers, size)


def rough_kind(body: Body) -> tuple[int, ...]:
    """Return a key that is cheap to compute and equal for kernels of the same template."""
    return len(body.values()), len(body.stores), len(body.loops), len(body.reduction)
