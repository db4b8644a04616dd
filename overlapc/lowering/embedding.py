"""Lowers embeddings (the rows of a table by token) and the gradient of the table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch

from overlapc.ir.body import Body, Index, Load, Store, Value, compute_dtype, op
from overlapc.ir.conversions import cast, constant
from overlapc.ir.indexing import flat_index, loop_symbol, numel
from overlapc.ir.ops import Layout, View
from overlapc.lowering.context import Lowering
from overlapc.lowering.indexing import Element, both, element_at, masked_element, picked, positioned
from overlapc.lowering.scatter import Position, contiguous, contiguous_strides, refuse_if_deterministic, store_at
from overlapc.lowering.table import Impossible, lowers

aten = torch.ops.aten


@lowers(aten.embedding.default)
def embedding(
    context: Lowering,
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


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    context: Lowering, grad: View, indices: View, num_weights: Any, padding_idx: Any, scale_grad_by_freq: bool
) -> View:
    """Add up the rows of `grad` by token.

    In low precision the sums are float32. A table of sums for the whole vocabulary would be written and read in full,
    so if there are fewer tokens than words, only words that occur more than once use a row of sums.
    """
    if scale_grad_by_freq:
        raise Impossible("gradients scaled by how often a token occurs")
    refuse_if_deterministic()
    out = context.layout(context.value_of(), offset=sympy.S.Zero)
    many = not indices.size or _hint(context, numel(indices.size)) >= _hint(context, out.size[0])
    if many or grad.dtype == compute_dtype(grad.dtype):
        return _summed_by_token(context, grad, indices, padding_idx, out)
    return _summed_at_last_token(context, grad, indices, padding_idx, out)


def _hint(context: Lowering, size: sympy.Expr) -> int:
    return context.graph.hint(size)


def _token(context: Lowering, indices: View, position: Position) -> Value:
    return cast(context.element(indices, position), torch.int64)


def _counts(token: Value, padding_idx: Any) -> list[Value]:
    """Return the conditions under which a token has a gradient; an empty list without padding (-1)."""
    padding = sympy.sympify(padding_idx)
    return [] if padding == -1 else [op("ne", token, Index(padding))]


def _with_conditions(spot: Element, conditions: Sequence[Value]) -> Element:
    return Element(spot.index, both(spot.inside, *conditions), spot.indirect)


def _summed_by_token(context: Lowering, grad: View, indices: View, padding_idx: Any, out: Layout) -> View:
    wide = compute_dtype(out.dtype)
    same = wide == out.dtype
    sums = context.pointwise(
        lambda: constant(0, wide),
        name=None if same else context.name_for("sums"),
        layout=contiguous(out.device, wide, out.size),
    )

    def body(target: View) -> Body:
        loops, position = context.loops_over(contiguous(out.device, wide, grad.size))
        token = _token(context, indices, position[:-1])
        spot = _with_conditions(
            element_at(target, (sympy.S.Zero, position[-1]), {0: token}), _counts(token, padding_idx)
        )
        return Body(loops, (), (store_at(target, spot, context.element(grad, position), "add"),))

    changed = context.update(sums, body)
    return changed if same else context.pointwise(lambda total: total, changed)


def _summed_at_last_token(context: Lowering, grad: View, indices: View, padding_idx: Any, out: Layout) -> View:
    """Add up the gradients of each word in the row of its last token; a word that occurs once needs no sum.

    ends[0, word] = number of its last token, ends[1, word] = number of its first one, from the end; -1 for none
    sums[n, d]    = grad[n, d]     for the last token of a word that occurs several times
    sums[last, d] += grad[n, d]    for the other tokens of the word
    out[v, d]     = grad[last, d] if the word occurs once, else sums[last, d]; 0 for words that do not occur
    """
    tokens, width = numel(indices.size), out.size[1]
    if not _rows_have_one_stride(grad.layout):
        copied = contiguous(out.device, grad.dtype, grad.size)
        grad = context.pointwise(lambda value: value, grad, name=context.name_for("grad"), layout=copied)
    ends = _ends(context, indices, padding_idx, out)
    rows = contiguous(out.device, torch.float32, (*indices.size, width))
    number_strides = contiguous_strides(indices.size)

    def token_at(position: Position) -> tuple[Value, Value, _Occurrences]:
        """Return the token's number, whether it has a gradient, and where its word occurs."""
        token = _token(context, indices, position[:-1])
        spot = element_at(ends, (sympy.S.Zero, sympy.S.Zero), {1: token})
        counts = both(spot.inside, *_counts(token, padding_idx))
        number = Index(flat_index(position[:-1], number_strides, sympy.S.Zero), torch.int32)
        return number, counts, _occurrences(ends, spot.indirect[0][1], counts, tokens)

    def begin(target: View) -> Body:
        loops, position = context.loops_over(rows)
        number, counts, found = token_at(position)
        mine = both(counts, op("eq", found.last, number), op("ne", found.first, number))
        value = cast(masked_element(grad, position, mine), torch.float32)
        return Body(loops, (), (Store(target.buffer, target.layout.at(position), value, torch.float32, mask=mine),))

    sums = context.loops(begin, rows, context.name_for("sums"))

    def add(target: View) -> Body:
        loops, position = context.loops_over(rows)
        number, counts, found = token_at(position)
        other = both(counts, op("ne", found.last, number))
        value = masked_element(grad, position, other)
        return Body(loops, (), (store_at(target, _row(target, found.last, position[-1], other), value, "add"),))

    sums = context.update(sums, add)

    def finish(result: View) -> Body:
        loops, position = context.loops_over(result.layout)
        found = _occurrences(ends, Index(position[0]), None, tokens)
        occurs = op("ge", found.last, constant(0, torch.int32))
        occurs_once = op("eq", found.last, found.first)
        one = _load(grad, _row(grad, found.last, position[1], both(occurs, occurs_once)))
        many = _load(sums, _row(sums, found.last, position[1], both(occurs, op("logical_not", occurs_once))))
        return Body(loops, (), (context.store(result, position, op("where", occurs_once, one, many)),))

    return context.loops(finish)


@dataclass(frozen=True, slots=True)
class _Occurrences:
    """Numbers (int32) of the last and the first token of a word; `last` is below 0 if the word does not occur."""

    last: Value
    first: Value


def _ends(context: Lowering, indices: View, padding_idx: Any, out: Layout) -> View:
    """Compute the table of last and first tokens, see `_summed_at_last_token`."""
    size = (sympy.Integer(2), out.size[0])
    no_token = constant(-1, torch.int32)
    ends = context.pointwise(
        lambda: no_token, name=context.name_for("ends"), layout=contiguous(out.device, torch.int32, size)
    )
    strides = contiguous_strides(indices.size)

    def claim(target: View) -> Body:
        loops, position = context.loops_over(contiguous(out.device, torch.int32, indices.size))
        token = _token(context, indices, position)
        number = flat_index(position, strides, sympy.S.Zero)
        stores = []
        for end, value in enumerate((number, numel(indices.size) - 1 - number)):
            spot = _with_conditions(
                element_at(target, (sympy.Integer(end), sympy.S.Zero), {1: token}), _counts(token, padding_idx)
            )
            stores.append(store_at(target, spot, Index(value, torch.int32), "max"))
        return Body(loops, (), tuple(stores))

    return context.update(ends, claim)


def _occurrences(ends: View, word: Value, known: Value | None, tokens: sympy.Expr) -> _Occurrences:
    """Load where `word` (int64) occurs; nothing is read where `known` is false."""
    if isinstance(word, Index):
        last, turned = (
            Load(ends.buffer, ends.layout.at((sympy.Integer(end), word.expr)), torch.int32) for end in (0, 1)
        )
    else:
        symbol = loop_symbol("i", 0)
        last, turned = (
            Load(ends.buffer, ends.layout.at((sympy.Integer(end), symbol)), torch.int32, known, ((symbol, word),))
            for end in (0, 1)
        )
    return _Occurrences(last, op("sub", Index(tokens - 1, torch.int32), turned))


def _rows_have_one_stride(layout: Layout) -> bool:
    """Whether the rows of all tokens have one stride, in the order of token numbers."""
    follow = zip(layout.size[1:-1], layout.stride[:-2], layout.stride[1:-1], strict=True)
    return all(sympy.expand(outer - extent * inner) == 0 for extent, outer, inner in follow)


def _row(target: View, row: Value, column: sympy.Expr, known: Value) -> Element:
    """Return the place of column `column` in the row of token number `row`; `target` is [tokens..., d].

    known: whether there is such a token.
    """
    symbol = loop_symbol("i", 0)
    step, inner = target.layout.stride[-2:]
    index = target.layout.offset + symbol * step + column * inner
    return Element(index, known, ((symbol, cast(row, torch.int64)),))


def _load(x: View, spot: Element) -> Value:
    return cast(Load(x.buffer, spot.index, x.dtype, spot.inside, spot.indirect), torch.float32)
