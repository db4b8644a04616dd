"""Lowers ops that write elements at positions loaded from memory.

A scatter is two kernels: a copy of the tensor, and an update of that copy in place with one iteration per written
element. If several iterations may write one element, they combine atomically in an accumulator whose dtype has hardware
atomics and at least the precision of float32; a third kernel then converts it to the result's dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from overlapc.ir.body import Body, Checked, Index, Load, Store, Value, compute_dtype, op
from overlapc.ir.conversions import cast, constant
from overlapc.ir.ops import Layout, View
from overlapc.lowering.context import Lowering
from overlapc.lowering.indexing import (
    Element,
    element_at,
    in_bounds,
    indexed,
    positioned,
)
from overlapc.lowering.table import Impossible, lowers

aten = torch.ops.aten

Position = tuple[sympy.Expr, ...]


# --- accumulators


@dataclass(frozen=True, slots=True)
class AtomicAccumulator:
    """How iterations combine elements in memory: dtype and mode of the atomics, and conversions to it and back."""

    dtype: torch.dtype
    mode: str
    enter: Callable[[Value], Value]
    leave: Callable[[Value], Value]


def accumulator(dtype: torch.dtype, mode: str) -> AtomicAccumulator:
    """Return the accumulator that combines elements of `dtype` by `mode`, one of a store's modes."""
    if mode == "set":
        return AtomicAccumulator(dtype, mode, lambda value: value, lambda value: value)
    if dtype.is_floating_point:
        wide = compute_dtype(dtype)
        if mode == "add":
            return AtomicAccumulator(wide, mode, lambda value: cast(value, wide), lambda value: value)
        bits = torch.int32 if wide == torch.float32 else torch.int64
        return AtomicAccumulator(bits, mode, lambda value: ordered(cast(value, wide), mode), from_ordered)
    if dtype == torch.bool:
        mode = "min" if mode == "min" else "max"  # a sum of bools is true if any is
    wide = dtype if dtype in (torch.int32, torch.int64) else torch.int32
    return AtomicAccumulator(wide, mode, lambda value: cast(value, wide), lambda value: value)


def ordered(value: Value, mode: str) -> Value:
    """Map floats to integers of the same order, with NaN beyond all numbers, in the direction in which `mode` looks."""
    bits = torch.int32 if value.dtype == torch.float32 else torch.int64
    limits = torch.iinfo(bits)
    nan = constant(limits.max if mode == "max" else limits.min, bits)
    return op("where", op("isnan", value), nan, _flipped(op("bitcast", value, dtype=bits)))


def from_ordered(key: Value) -> Value:
    """Invert `ordered`; the integer that represents NaN becomes a NaN of either sign."""
    wide = torch.float32 if key.dtype == torch.int32 else torch.float64
    return op("bitcast", _flipped(key), dtype=wide)


def _flipped(bits: Value) -> Value:
    """Flip all bits except the sign of negative numbers; the function is its own inverse."""
    limits = torch.iinfo(bits.dtype)
    negative = op("lt", bits, constant(0, bits.dtype))
    return op("where", negative, op("bitwise_xor", bits, constant(limits.max, bits.dtype)), bits)


# --- scatters


def scatter_into(
    context: Lowering,
    x: View,
    size: Sequence[sympy.Expr],
    where: Callable[[View, Position], Element],
    value: Callable[[Position], Value],
    mode: str = "set",
    order: Layout | None = None,
) -> View:
    """Return `x` with `value` combined into the element at `where`, for every position of a tensor of `size`.

    order: layout in whose memory order the positions are visited; contiguous by default.
    Raises Impossible under `torch.use_deterministic_algorithms`: the order of iterations that update one element is not
    fixed.
    """
    refuse_if_deterministic()
    kept = accumulator(x.dtype, mode)
    out = context.layout(context.value_of(), offset=sympy.S.Zero)
    if not out.is_dense():
        raise Impossible(f"output strides {out.stride} of size {out.size} leave holes")
    same = kept.dtype == x.dtype
    started = x
    if not (same and context.replaces_its_input(x)):
        started = context.pointwise(
            lambda element: kept.enter(element),
            x,
            name=None if same else context.name_for("sums"),
            layout=Layout(out.device, kept.dtype, out.size, out.stride),
        )
    visited = order or contiguous(out.device, x.dtype, size)

    def body(target: View) -> Body:
        loops, position = context.loops_over(visited)
        spot = where(target, position)
        element = kept.enter(cast(value(position), x.dtype))
        return Body(loops, (), (store_at(target, spot, element, kept.mode),))

    changed = context.update(started, body)
    return changed if same else context.pointwise(kept.leave, changed)


def store_at(target: View, spot: Element, value: Value, mode: str) -> Store:
    """Return a store to an element whose position may be loaded from memory."""
    return Store(target.buffer, spot.index, cast(value, target.dtype), target.dtype, mode, spot.inside, spot.indirect)


def refuse_if_deterministic() -> None:
    """Raise Impossible if deterministic algorithms are enabled, because the order of atomics is not fixed."""
    if torch.are_deterministic_algorithms_enabled():
        raise Impossible("deterministic algorithms are enabled, and the order of atomics is not fixed")


def contiguous(device: torch.device, dtype: torch.dtype, size: Sequence[sympy.Expr]) -> Layout:
    """Return the row-major layout of a new tensor."""
    return Layout(device, dtype, tuple(size), contiguous_strides(size))


def contiguous_strides(size: Sequence[sympy.Expr]) -> tuple[sympy.Expr, ...]:
    """Return row-major strides in elements."""
    strides = [sympy.S.One] * len(size)
    for dim in range(len(size) - 2, -1, -1):
        strides[dim] = sympy.expand(strides[dim + 1] * size[dim + 1])
    return tuple(strides)


def _along(context: Lowering, dim: int, index: View) -> Callable[[View, Position], Element]:
    """Return a function to the element that `index`, a tensor over the same positions, selects along `dim`."""

    def where(target: View, position: Position) -> Element:
        return element_at(target, position, {dim: cast(context.element(index, position), torch.int64)})

    return where


def _scatter(context: Lowering, x: View, dim: int, index: View, source: Any, mode: str) -> View:
    """Lower a scatter along `dim`; `source` is a tensor at least as large as `index`, or a number."""
    if not x.size or not index.size:
        raise Impossible("a 0-dim tensor")
    if any(extent == 0 for extent in index.size):  # an empty index may have any number of dims
        return context.pointwise(lambda element: element, x)
    dim = dim % len(x.size)

    def value(position: Position) -> Value:
        if isinstance(source, View):
            return Load(source.buffer, source.layout.at(position), source.dtype)  # not broadcast: sizes may differ
        return context.scalar(source)

    return scatter_into(context, x, index.size, _along(context, dim, index), value, mode, index.layout)


@lowers(aten.scatter.src)
def scatter(context: Lowering, x: View, dim: int, index: View, source: View) -> View:
    return _scatter(context, x, dim, index, source, "set")


@lowers(aten.scatter_add.default)
def scatter_add(context: Lowering, x: View, dim: int, index: View, source: View) -> View:
    return _scatter(context, x, dim, index, source, "add")


_REDUCES = {"sum": "add", "add": "add", "amax": "max", "amin": "min"}


@lowers(aten.scatter.reduce, aten.scatter.value_reduce)
def scatter_reduce_old(context: Lowering, x: View, dim: int, index: View, source: Any, *, reduce: str) -> View:
    if reduce not in _REDUCES:
        raise Impossible(f"a scatter that reduces by {reduce}")
    return _scatter(context, x, dim, index, source, _REDUCES[reduce])


@lowers(aten.scatter_reduce.two)
def scatter_reduce(
    context: Lowering, x: View, dim: int, index: View, source: View, reduce: str, include_self: bool = True
) -> View:
    if reduce not in _REDUCES or not include_self:
        raise Impossible(f"a scatter that reduces by {reduce}, include_self={include_self}")
    return _scatter(context, x, dim, index, source, _REDUCES[reduce])


@lowers(aten.scatter.value)
def scatter_value(context: Lowering, x: View, dim: int, index: View, number: Any) -> View:
    """Lower a scatter of one number per row, as in a loss's gradient, to a pointwise kernel that compares indices."""
    if not x.size or not index.size:
        raise Impossible("a 0-dim tensor")
    context.check_held(x.dtype, number)
    dim = dim % len(x.size)
    one_a_row = (*x.size[:dim], sympy.S.One, *x.size[dim + 1 :])
    if index.size != one_a_row:
        return _scatter(context, x, dim, index, number, "set")

    def value(position: Position) -> Value:
        at = [sympy.S.Zero if axis == dim else here for axis, here in enumerate(position)]
        where = cast(context.element(index, at), torch.int64)
        message = f"an index is out of bounds for dimension {dim} with size {x.size[dim]}"
        hit = op("eq", Index(position[dim]), Checked(where, in_bounds(where, x.size[dim]), message))
        return op("where", hit, cast(context.scalar(number), x.dtype), context.element(x, position))

    return positioned(context, value)


@lowers(aten.index_put.default)
def index_put(
    context: Lowering, x: View, indices: Sequence[View | None], values: View, accumulate: bool = False
) -> View:
    if values.dtype != x.dtype:  # an error in eager, except for a number that replaces what a mask chooses
        raise Impossible("values of another dtype")
    places = indexed(x, indices)

    def where(target: View, position: Position) -> Element:
        return element_at(target, *places.at(context, position))

    return scatter_into(
        context,
        x,
        places.size,
        where,
        lambda position: context.element(values, position),
        "add" if accumulate else "set",
    )
