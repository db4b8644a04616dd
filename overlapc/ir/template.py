"""Templates of kernels that differ only in their buffers and possibly in one size, so that they can share a function.

   y[p0] = exp(a[p0]) for p0 < 4096;  z[p0] = exp(b[p0]) for p0 < 100
-> both are  b1[p0] = exp(b0[p0]) for p0 < n
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache, wraps

import sympy

from overlapc.ir.body import Body, Load, Loop, Store, Value
from overlapc.ir.rewriting import rewrite

_NUMBERED = "_numbered"
SIZE = sympy.Symbol("n", integer=True, positive=True)


@dataclass(frozen=True, slots=True)
class Template:
    """A body with buffers b0, b1, …; if `size` is not None, its only loop has `SIZE` iterations."""

    body: Body
    buffers: tuple[str, ...]  # the buffers that b0, b1, … replace
    size: int | None  # the number that SIZE replaces


def with_numbered_buffers(body: Body) -> tuple[Body, tuple[str, ...]]:
    """Return `body` with buffers b0, b1, … in the order of their first use, and the buffers that these replace."""
    known: tuple[Body, tuple[str, ...]] | None = body.__dict__.get(_NUMBERED)  # kept as a cached_property keeps it
    if known is None:
        accesses: list[Load | Store] = [*body.loads(), *body.stores]
        buffers = tuple(dict.fromkeys(access.buffer for access in accesses))
        names = {buffer: f"b{at}" for at, buffer in enumerate(buffers)}
        known = body.__dict__[_NUMBERED] = _only(with_buffers(body, names)), buffers
    return known


def with_buffers(body: Body, names: Mapping[str, str]) -> Body:
    """Return `body` over other buffers. names: old name -> new name, for all of its buffers."""

    def renamed(value: Value) -> Value | None:
        if not isinstance(value, Load):
            return None
        return Load(names[value.buffer], value.index, value.memory_dtype, value.mask, value.indirect)

    made = rewrite(body, body.loops, body.reduction, replace=renamed)
    stores = tuple(dataclasses.replace(store, buffer=names[store.buffer]) for store in made.stores)
    return Body(body.loops, body.reduction, stores)


def over_buffers(body: Body, names: Mapping[str, str]) -> Body:
    """Return `body` over other buffers. names: old name -> new name, for some of its buffers."""
    numbered, buffers = with_numbered_buffers(body)
    new = tuple(names.get(buffer, buffer) for buffer in buffers)
    made = with_buffers(body, dict(zip(buffers, new, strict=True)))
    made.__dict__[_NUMBERED] = numbered, new
    return made


@lru_cache(10_000)
def _only(body: Body) -> Body:
    """Return one object for all equal bodies, so that they compare at once."""
    return body


def once_for_all_buffers(function: Callable[..., Body | None]) -> Callable[..., Body | None]:
    """Decorate a function of bodies, so that it runs once for all bodies that differ only in the names of buffers, as
    those of a model's layers do.

    The function must return None or a body over buffers of its arguments, and may compare the names of buffers with
    each other, but not depend on them otherwise. An argument that it returns unchanged is returned as that object.
    """

    @lru_cache(10_000)
    def of_numbered(
        bodies: tuple[Body, ...], places: tuple[tuple[int, ...], ...]
    ) -> tuple[Body, tuple[int, ...]] | int | None:
        given = [
            body if place == tuple(range(len(place))) else with_buffers(body, _numbers(f"b{at}" for at in place))
            for body, place in zip(bodies, places, strict=True)
        ]
        made = function(*given)
        if made is None:
            return None
        if any(made is body for body in given):
            return next(at for at, body in enumerate(given) if made is body)
        numbered, buffers = with_numbered_buffers(made)
        return numbered, tuple(int(buffer[1:]) for buffer in buffers)

    @wraps(function)
    def of(*bodies: Body) -> Body | None:
        numbered = [with_numbered_buffers(body) for body in bodies]
        place = {name: at for at, name in enumerate(dict.fromkeys(name for _, names in numbered for name in names))}
        places = tuple(tuple(place[name] for name in names) for _, names in numbered)
        found = of_numbered(tuple(body for body, _ in numbered), places)
        if found is None or isinstance(found, int):
            return None if found is None else bodies[found]
        body, at = found
        every = list(place)
        buffers = tuple(every[each] for each in at)
        return over_buffers(body, _numbers(buffers))

    return of


def _numbers(buffers: Iterable[str]) -> dict[str, str]:
    return {f"b{at}": buffer for at, buffer in enumerate(buffers)}


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
