"""Lowers ops that select or join elements: cat, padding, gathers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from overlapc.ir.body import Body, Checked, Index, Load, Value, op
from overlapc.ir.conversions import cast, constant
from overlapc.ir.indexing import is_one, loop_symbol
from overlapc.ir.ops import View
from overlapc.lowering.context import Lowering
from overlapc.lowering.table import Impossible, lowers

aten = torch.ops.aten

MOST_JOINED = 16  # a cat of n tensors takes n conditions per element; for more tensors the library's copy is faster


def positioned(context: Lowering, value: Callable[[tuple[sympy.Expr, ...]], Value]) -> View:
    """Add a kernel whose elements are computed from their position."""

    def body(out: View) -> Body:
        loops, position = context.loops_over(out.layout)
        return Body(loops, (), (context.store(out, position, value(position)),))

    return context.loops(body)


def below(expr: sympy.Expr, limit: Any) -> Value:
    """Return the condition `expr < limit`."""
    return op("lt", Index(expr), Index(sympy.sympify(limit)))


def at_least(expr: sympy.Expr, limit: Any) -> Value:
    """Return the condition `expr >= limit`."""
    return op("ge", Index(expr), Index(sympy.sympify(limit)))


def within(position: sympy.Expr, begin: sympy.Expr, end: sympy.Expr, extent: sympy.Expr) -> list[Value]:
    """Return the conditions for `begin <= position < end`, without those that all positions in 0 … extent - 1 meet."""
    asked = [] if sympy.sympify(begin).is_nonpositive else [at_least(position, begin)]
    return asked if sympy.expand(end - extent).is_nonnegative else [*asked, below(position, end)]


def both(*conditions: Value) -> Value:
    """Return the conjunction of all conditions."""
    joined = conditions[0]
    for condition in conditions[1:]:
        joined = op("logical_and", joined, condition)
    return joined


def masked_element(x: View, position: Sequence[sympy.Expr], mask: Value) -> Load:
    """Return the element of `x` at `position`; it is 0, and not read, where `mask` is false."""
    at = tuple(sympy.S.Zero if is_one(extent) else where for where, extent in zip(position, x.size, strict=True))
    return Load(x.buffer, x.layout.at(at), x.dtype, mask)


@lowers(aten.cat.default)
def cat(context: Lowering, tensors: Sequence[View], dim: int = 0) -> View:
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
        for part, start, end in reversed(list(zip(parts, starts, starts[1:], strict=False))):
            inside = within(position[dim], start, end, starts[-1])
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
def constant_pad(context: Lowering, x: View, pad: Sequence[Any], fill: Any = 0) -> View:
    context.check_held(x.dtype, fill)
    rank = len(x.size)
    sides = {rank - 1 - at // 2: (pad[at], pad[at + 1]) for at in range(0, len(pad), 2)}  # dim -> its padding

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        moved, inside = list(position), []
        for dim, (left, right) in sides.items():
            moved[dim] = position[dim] - left
            end = x.size[dim] + left
            inside += within(position[dim], left, end, end + right)
        if not inside:
            return context.element(x, moved)
        mask = both(*inside)
        # A padded dim of size 1 still needs its position for the mask, not for the load.
        return op("where", mask, masked_element(x, moved, mask), cast(context.scalar(fill), x.dtype))

    return positioned(context, value)


@dataclass(frozen=True, slots=True)
class Element:
    """An element of a tensor at a position that is partly loaded from memory; `inside`: whether it is in bounds."""

    index: sympy.Expr
    inside: Value
    indirect: tuple[tuple[sympy.Symbol, Value], ...]


def element_at(x: View, at: Sequence[sympy.Expr], wanted: Mapping[int, Value]) -> Element:
    """Return the element of `x` at `at`, with the positions in the dims of `wanted` loaded from memory and checked."""
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
    return Element(x.layout.at(tuple(position)), both(*inside), tuple(indirect))


def picked(x: View, at: Sequence[sympy.Expr], wanted: Mapping[int, Value]) -> Load:
    """Load the element of `x` at `at`, with the positions in the dims of `wanted` loaded from memory and checked."""
    found = element_at(x, at, wanted)
    return Load(x.buffer, found.index, x.dtype, found.inside, found.indirect)


def index_value(context: Lowering, index: View, position: Sequence[sympy.Expr], extent: sympy.Expr) -> Value:
    """Load an index from memory; negative indices count from the end."""
    value = cast(context.element(index, position), torch.int64)
    return op("where", op("lt", value, constant(0, torch.int64)), op("add", value, Index(extent)), value)


def in_bounds(value: Value, extent: sympy.Expr) -> Value:
    """Return the condition that an index is in 0 … extent - 1."""
    return both(op("ge", value, constant(0, torch.int64)), op("lt", value, Index(extent)))


@lowers(aten.gather.default)
def gather(context: Lowering, x: View, dim: int, index: View, sparse_grad: bool = False) -> View:
    if not x.size or not index.size:
        raise Impossible("a 0-dim tensor")
    dim = dim % len(x.size)

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        return picked(x, position, {dim: cast(context.element(index, position), torch.int64)})

    return positioned(context, value)


@lowers(aten.index_select.default)
def index_select(context: Lowering, x: View, dim: int, index: View) -> View:
    if not x.size or not index.size:
        raise Impossible("a 0-dim tensor")
    dim = dim % len(x.size)

    def value(position: tuple[sympy.Expr, ...]) -> Value:
        return picked(x, position, {dim: cast(context.element(index, (position[dim],)), torch.int64)})

    return positioned(context, value)


@dataclass(frozen=True, slots=True)
class Indexed:
    """`x[indices]`: the dims of its index tensors in the result, and the position in `x` of each element."""

    x: View
    indices: Mapping[int, View]  # dim of x -> its index tensor
    shape: tuple[sympy.Expr, ...]  # broadcast shape of the index tensors
    start: int  # dim of the result at which that shape begins

    @property
    def size(self) -> tuple[sympy.Expr, ...]:
        """Size of the result."""
        kept = [extent for dim, extent in enumerate(self.x.size) if dim not in self.indices]
        return (*kept[: self.start], *self.shape, *kept[self.start :])

    def at(self, context: Lowering, position: Sequence[sympy.Expr]) -> tuple[list[sympy.Expr], dict[int, Value]]:
        """Map a position in the result to one in `x`, and to the values of the dims that are loaded from memory."""
        end = self.start + len(self.shape)
        here = position[self.start : end]
        rest = iter((*position[: self.start], *position[end:]))
        at = [sympy.S.Zero if dim in self.indices else next(rest) for dim in range(len(self.x.size))]
        wanted = {dim: index_value(context, index, here, self.x.size[dim]) for dim, index in self.indices.items()}
        return at, wanted


def indexed(x: View, indices: Sequence[View | None]) -> Indexed:
    """Describe `x[indices]`; raise Impossible for masks, whose number of elements depends on data."""
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype in (torch.bool, torch.uint8) for index in given.values()):
        raise Impossible("a mask")
    dims = list(given)
    shape = broadcast([index.size for index in given.values()])
    # Index tensors in adjacent dims put the common shape in their place, otherwise it comes first.
    start = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    return Indexed(x, given, shape, start)


def broadcast(shapes: Sequence[Sequence[sympy.Expr]]) -> tuple[sympy.Expr, ...]:
    """Return the broadcast shape; sizes that are not known to be 1 are equal, as tracing has checked."""
    rank = max(len(shape) for shape in shapes)
    common: list[sympy.Expr] = [sympy.S.One] * rank
    for shape in shapes:
        for dim, extent in enumerate(shape, rank - len(shape)):
            if not is_one(extent):
                common[dim] = extent
    return tuple(common)


@lowers(aten.index.Tensor)
def index(context: Lowering, x: View, indices: Sequence[View | None]) -> View:
    reads = indexed(x, indices)
    return positioned(context, lambda position: picked(x, *reads.at(context, position)))
