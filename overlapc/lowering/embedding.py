"""Embeddings: rows of a table by token, and the table's gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy
import torch

from overlapc.ir.body import Body, Index, Load, Value, compute_dtype, op
from overlapc.ir.indexing import flat_index, loop_symbol, numel
from overlapc.ir.ops import Layout, View
from overlapc.lowering.graph import Context, cast, constant
from overlapc.lowering.indexing import Place, both, picked, place, positioned
from overlapc.lowering.scatter import Position, contiguous, contiguous_strides, refuse_if_deterministic, store_at
from overlapc.lowering.table import Impossible, lowers

aten = torch.ops.aten


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


@lowers(aten.embedding_dense_backward.default)
def embedding_dense_backward(
    context: Context, grad: View, indices: View, num_weights: Any, padding_idx: Any, scale_grad_by_freq: bool
) -> View:
    """Rows of `grad` added up by token.

    In a low precision the sums are float32. A table of them as large as the vocabulary would be written and read
    whole: where there are fewer tokens than words, each word that occurs gets the row of one of its tokens instead.
    """
    if scale_grad_by_freq:
        raise Impossible("gradients scaled by how often a token occurs")
    refuse_if_deterministic()
    out = context.layout(context.value_of(), offset=sympy.S.Zero)
    if grad.dtype == compute_dtype(grad.dtype) or _hint(context, numel(indices.size)) >= _hint(context, out.size[0]):
        return _added_up(context, grad, indices, padding_idx, out)
    return _added_up_by_owner(context, grad, indices, padding_idx, out)


def _hint(context: Context, size: sympy.Expr) -> int:
    return context.graph.hint(size)


def _token(context: Context, indices: View, position: Position) -> Value:
    return cast(context.element(indices, position), torch.int64)


def _counts(token: Value, padding_idx: Any) -> list[Value]:
    """The condition under which a token has a gradient; none without padding (-1)."""
    padding = sympy.sympify(padding_idx)
    return [] if padding == -1 else [op("ne", token, Index(padding))]


def _with(spot: Place, conditions: Sequence[Value]) -> Place:
    return Place(spot.index, both(spot.inside, *conditions), spot.indirect)


def _added_up(context: Context, grad: View, indices: View, padding_idx: Any, out: Layout) -> View:
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
        spot = _with(place(target, (sympy.S.Zero, position[-1]), {0: token}), _counts(token, padding_idx))
        return Body(loops, (), (store_at(target, spot, context.element(grad, position), "add"),))

    changed = context.update(sums, body)
    return changed if same else context.pointwise(lambda total: total, changed)


def _added_up_by_owner(context: Context, grad: View, indices: View, padding_idx: Any, out: Layout) -> View:
    """Every word's owner is the last of its tokens; its row in `sums` holds the word's gradient.

    owner[indices[n]] max= n;  sums[owner[indices[n]], d] += grad[n, d];  out[v, d] = sums[owner[v], d] or 0
    """
    device, words, width = out.device, out.size[0], out.size[1]
    tokens = numel(indices.size)
    nobody = constant(-1, torch.int32)
    owner = context.pointwise(
        lambda: nobody, name=context.name_for("owner"), layout=contiguous(device, torch.int32, (words,))
    )
    strides = contiguous_strides(indices.size)

    def claim(target: View) -> Body:
        loops, position = context.loops_over(contiguous(device, torch.int32, indices.size))
        token = _token(context, indices, position)
        spot = _with(place(target, (sympy.S.Zero,), {0: token}), _counts(token, padding_idx))
        number = Index(flat_index(position, strides, sympy.S.Zero), torch.int32)
        return Body(loops, (), (store_at(target, spot, number, "max"),))

    owner = context.update(owner, claim)
    sums = context.pointwise(
        lambda: constant(0, torch.float32),
        name=context.name_for("sums"),
        layout=contiguous(device, torch.float32, (tokens, width)),
    )

    def add(target: View) -> Body:
        loops, position = context.loops_over(contiguous(device, torch.float32, grad.size))
        token = _token(context, indices, position[:-1])
        spot = _with(place(owner, (sympy.S.Zero,), {0: token}), _counts(token, padding_idx))
        row = Load(owner.buffer, spot.index, torch.int32, spot.inside, spot.indirect)
        return Body(
            loops, (), (store_at(target, _row(target, row, position[-1], spot.inside), grad_at(position), "add"),)
        )

    def grad_at(position: Position) -> Value:
        return context.element(grad, position)

    sums = context.update(sums, add)

    def body(result: View) -> Body:
        loops, position = context.loops_over(result.layout)
        row = Load(owner.buffer, position[0], torch.int32)
        owned = op("ge", row, constant(0, torch.int32))
        spot = _row(sums, row, position[1], owned)
        total = Load(sums.buffer, spot.index, torch.float32, spot.inside, spot.indirect)
        return Body(loops, (), (context.store(result, position, total),))

    return context.loops(body)


def _row(target: View, row: Value, column: sympy.Expr, known: Value) -> Place:
    """`target[row, column]` where `known` says that there is such a row."""
    symbol = loop_symbol("i", 0)
    return Place(target.layout.at((symbol, column)), known, ((symbol, cast(row, torch.int64)),))
