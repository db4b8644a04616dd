"""Ops that pick, place or join elements: cat, padding, slices written into tensors, gathers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
import torch

from overlapc.ir.body import Body, Checked, Index, Load, Value, op
from overlapc.ir.indexing import is_one, loop_symbol
from overlapc.ir.ops import View
from overlapc.lowering.graph import Context, cast, constant
from overlapc.lowering.table import Impossible, lowers

aten = torch.ops.aten

MOST_JOINED = 8  # a longer cat is a chain of as many conditions per element; the library's copy is faster


def positioned(context: Context, value: Callable[[tuple[sympy.Expr, ...]], Value]) -> View:
    """A kernel whose elements are computed from their position."""

    def body(out: View) -> Body:
        loops, position = context.loops_over(out.layout)
        return Body(loops, (), (context.store(out, position, value(position)),))

    return context.loops(body)


def below(expr: sympy.Expr, limit: Any) -> Value:
    return op("lt", Index(expr), Index(sympy.sympify(limit)))


def at_least(expr: sympy.Expr, limit: Any) -> Value:
    return op("ge", Index(expr), Index(sympy.sympify(limit)))


def both(*conditions: Value) -> Value:
    joined = conditions[0]
    for condition in conditions[1:]:
        joined = op("logical_and", joined, condition)
    return joined


def masked_element(x: View, position: Sequence[sympy.Expr], mask: Value) -> Load:
    """The element of `x` there; 0 and not read where `mask` is false."""
    at = tuple(sympy.S.Zero if is_one(extent) else where for where, extent in zip(position, x.size, strict=True))
    return Load(x.buffer, x.layout.at(at), x.dtype, mask)


@lowers(aten.cat.default)
def cat(context: Context, tensors: Sequence[View], dim: int = 0) -> View:
    parts = [part for part in tensors if all(extent != 0 for extent in part.size)]
    if len(parts) > MOST_JOINED or not parts:
        raise Impossible(f"{len(parts)} tensors to join")
    out_dtype = context.value_of().dtype
    dim = dim % len(parts[0].size)

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        starts = [sympy.S.Zero]
        for part in parts:
            starts.append(starts[-1] + part.size[dim])
        joined: Value | None = None
        last = len(parts) - 1  # by number: a tensor may stand in the list twice
        for number, (part, start, end) in reversed(list(enumerate(zip(parts, starts, starts[1:], strict=False)))):
            inside = [at_least(position[dim], start)] if number > 0 else []
            inside += [below(position[dim], end)] if number < last else []
            moved = list(position)
            moved[dim] = position[dim] - start
            if not inside:
                return cast(context.element(part, position), out_dtype)
            here = cast(masked_element(part, moved, both(*inside)), out_dtype)
            joined = here if joined is None else op("where", below(position[dim], end), here, joined)
        assert joined is not None
        return joined

    return positioned(context, value)


@lowers(aten.constant_pad_nd.default)
def constant_pad(context: Context, x: View, pad: Sequence[Any], fill: Any = 0) -> View:
    rank = len(x.size)
    before = {rank - 1 - at // 2: pad[at] for at in range(0, len(pad), 2)}

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        moved, inside = list(position), []
        for dim, left in before.items():
            moved[dim] = position[dim] - left
            inside += [at_least(position[dim], left), below(position[dim], x.size[dim] + left)]
        if not inside:
            return context.element(x, position)
        mask = both(*inside)
        # A padded dim of size 1 still needs its position for the mask, not for the load.
        return op("where", mask, masked_element(x, moved, mask), cast(context.scalar(fill), x.dtype))

    return positioned(context, value)


@lowers(aten.slice_scatter.default)
def slice_scatter(
    context: Context, x: View, source: View, dim: int = 0, start: Any = None, end: Any = None, step: Any = 1
) -> View:
    if step != 1:
        raise Impossible("a step")
    dim = dim % len(x.size)
    begin = _slice_start(x.size[dim], start)

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        moved = list(position)
        moved[dim] = position[dim] - begin
        mask = both(at_least(position[dim], begin), below(position[dim], begin + source.size[dim]))
        return op("where", mask, cast(masked_element(source, moved, mask), x.dtype), context.element(x, position))

    return positioned(context, value)


def _slice_start(extent: sympy.Expr, start: Any) -> sympy.Expr:
    """Where a slice begins, counted from the front and within the dim."""
    begin = sympy.sympify(0 if start is None else start)
    if not (begin.is_Integer and extent.is_Integer):
        if begin.is_nonnegative:
            return begin
        raise Impossible("a symbolic start that may be negative")
    at = int(begin) + int(extent) if begin < 0 else int(begin)
    return sympy.Integer(min(max(at, 0), int(extent)))


@lowers(aten.select_scatter.default)
def select_scatter(context: Context, x: View, source: View, dim: int, index: Any) -> View:
    dim = dim % len(x.size)
    where = sympy.sympify(index)
    if not where.is_Integer:
        raise Impossible("a symbolic index")
    at = where + x.size[dim] if where < 0 else where

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        mask = op("eq", Index(position[dim]), Index(at))
        rest = [here for axis, here in enumerate(position) if axis != dim]
        return op("where", mask, cast(masked_element(source, rest, mask), x.dtype), context.element(x, position))

    return positioned(context, value)


def picked(x: View, at: Sequence[sympy.Expr], wanted: Mapping[int, Value]) -> Load:
    """The element of `x` at `at`, with the positions in the dims of `wanted` read from memory and checked."""
    position = list(at)
    indirect: list[tuple[sympy.Symbol, Value]] = []
    inside: list[Value] = []
    for dim, where in wanted.items():
        fits = in_bounds(where, x.size[dim])
        message = f"an index is out of bounds for dimension {dim} with size {x.size[dim]}"
        symbol = loop_symbol("i", len(indirect))
        position[dim] = symbol
        indirect.append((symbol, Checked(where, fits, message)))
        inside.append(fits)
    return Load(x.buffer, x.layout.at(tuple(position)), x.dtype, both(*inside), tuple(indirect))


def index_value(context: Context, index: View, position: Sequence[sympy.Expr], extent: sympy.Expr) -> Value:
    """An index loaded from memory, negative ones counted from the end."""
    value = cast(context.element(index, position), torch.int64)
    return op("where", op("lt", value, constant(0, torch.int64)), op("add", value, Index(extent)), value)


def in_bounds(value: Value, extent: sympy.Expr) -> Value:
    return both(op("ge", value, constant(0, torch.int64)), op("lt", value, Index(extent)))


@lowers(aten.gather.default)
def gather(context: Context, x: View, dim: int, index: View, sparse_grad: bool = False) -> View:
    if not x.size or not index.size:
        raise Impossible("a tensor without dims")
    dim = dim % len(x.size)

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        return picked(x, position, {dim: cast(context.element(index, position), torch.int64)})

    return positioned(context, value)


@lowers(aten.embedding.default)
def embedding(
    context: Context,
    weight: View,
    indices: View,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> View:
    def value(position: tuple[sympy.Expr, ...]) -> Value:
        where = cast(context.element(indices, position[:-1]), torch.int64)
        return picked(weight, (sympy.S.Zero, position[-1]), {0: where})

    return positioned(context, value)


@lowers(aten.index_select.default)
def index_select(context: Context, x: View, dim: int, index: View) -> View:
    if not x.size or not index.size:
        raise Impossible("a tensor without dims")
    dim = dim % len(x.size)

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        return picked(x, position, {dim: cast(context.element(index, (position[dim],)), torch.int64)})

    return positioned(context, value)


@lowers(aten.index.Tensor)
def index(context: Context, x: View, indices: Sequence[View | None]) -> View:
    given = {dim: each for dim, each in enumerate(indices) if each is not None}
    if any(each.dtype in (torch.bool, torch.uint8) for each in given.values()):
        raise Impossible("a mask")
    dims = list(given)
    rank = max(len(each.size) for each in given.values())
    # Index tensors that stand side by side put their dims in their place, others put them first.
    start = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        here = position[start : start + rank]
        rest = iter(position[:start] + position[start + rank :])
        at = [sympy.S.Zero if dim in given else next(rest) for dim in range(len(x.size))]
        wanted = {dim: index_value(context, each, here, x.size[dim]) for dim, each in given.items()}
        return picked(x, at, wanted)

    return positioned(context, value)


@lowers(aten.scatter.value)
def scatter_value(context: Context, x: View, dim: int, index: View, number: Any) -> View:
    """A scatter of one number per row, as in the gradient of a loss: each element asks whether it is meant."""
    if not x.size or not index.size:
        raise Impossible("a tensor without dims")
    dim = dim % len(x.size)
    same = all(a == b for axis, (a, b) in enumerate(zip(x.size, index.size, strict=True)) if axis != dim)
    if not is_one(index.size[dim]) or not same:
        raise Impossible("several indices a row")

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        at = [sympy.S.Zero if axis == dim else here for axis, here in enumerate(position)]
        where = cast(context.element(index, at), torch.int64)
        message = f"an index is out of bounds for dimension {dim} with size {x.size[dim]}"
        hit = op("eq", Index(position[dim]), Checked(where, in_bounds(where, x.size[dim]), message))
        return op("where", hit, cast(context.scalar(number), x.dtype), context.element(x, position))

    return positioned(context, value)
