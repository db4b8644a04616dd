"""Sliding-window attention, computed on one piece of the sequence at a time.

    scaled_dot_product_attention(q, k, v, attn_mask=|query - key| <= 64)        length**2 scores, most of them masked
 -> windowed_attention(q, k, v, 64, 64, piece=128)                               3 * 128 scores for each query

A piece of queries attends to the keys of its own piece and, if the window reaches them, of the neighbouring pieces.
Pieces become part of the batch dim, so any attention kernel that takes a mask can compute them.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapc.fx.masks.conditions import AllOf, Condition, NotNegative

SHORTEST_PIECE = 128  # queries in one program of an attention kernel
LEAST_SKIPPED = 2  # least ratio of the scores of the whole sequence to the scores computed in pieces


@dataclass(frozen=True, slots=True)
class Window:
    """A mask with which a query attends to keys from `before` positions before it to `after` positions after it."""

    before: int
    after: int

    def piece(self, length: int) -> int | None:
        """Return the length of a piece of a sequence of `length`; None if pieces save less than half of the scores."""
        size = -(-max(self.before, self.after, 1) // SHORTEST_PIECE) * SHORTEST_PIECE
        while length % size and size < length:
            size += SHORTEST_PIECE
        seen = size * (1 + (self.before > 0) + (self.after > 0))
        return size if length % size == 0 and LEAST_SKIPPED * seen <= length else None


def window_of(allowed: Condition, query: sympy.Symbol, key: sympy.Symbol) -> Window | None:
    """Return the window that `allowed` describes, where queries and keys have the same length; None if it is none."""
    if not isinstance(allowed, AllOf) or len(allowed.of) != 2:
        return None
    limits: dict[int, int] = {}
    for each in allowed.of:
        if not isinstance(each, NotNegative):
            return None
        step = each.value.coeff(query)
        limit = sympy.expand(each.value - step * (query - key))
        if step not in (1, -1) or not limit.is_Integer or limit < 0:
            return None
        limits[int(step)] = int(limit)
    return Window(before=limits[-1], after=limits[1]) if len(limits) == 2 else None


def windowed_attention(
    query: Tensor, key: Tensor, value: Tensor, before: int, after: int, *, piece: int, scale: float | None = None
) -> Tensor:
    """Compute attention of `[batch, heads, length, width]` tensors within a window.

    The result has the same shape, as a view of a `[batch, length, heads, width]` tensor. `piece` divides the length,
    and is at least `before` and at least `after`.
    """
    batch, _, length, _ = query.shape
    pieces = length // piece
    queries = query.transpose(1, 2).unflatten(1, (pieces, piece)).flatten(0, 1).transpose(1, 2)
    keys, values = (_with_neighbours(each, piece, before > 0, after > 0) for each in (key, value))
    mask = _mask(pieces, piece, before, after, query.device)
    mask = mask[None, :, None].expand(batch, -1, -1, -1, -1).flatten(0, 1)
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    return mixed.transpose(1, 2).unflatten(0, (batch, pieces)).flatten(1, 2).transpose(1, 2)


def _with_neighbours(x: Tensor, piece: int, before: bool, after: bool) -> Tensor:
    """Concatenate to each piece of keys the piece before it and the piece after it; zeros where there is none."""
    own = x.transpose(1, 2).unflatten(1, (-1, piece))
    parts = [own]
    if before:
        parts.insert(0, F.pad(own[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)))
    if after:
        parts.append(F.pad(own[:, 1:], (0, 0, 0, 0, 0, 0, 0, 1)))
    return torch.cat(parts, 2).flatten(0, 1).transpose(1, 2)


def _mask(pieces: int, piece: int, before: int, after: int, device: torch.device) -> Tensor:
    """Return the mask `[pieces, piece, keys]`: whether a query attends to a key of its own or a neighbouring piece."""
    count = piece * (1 + (before > 0) + (after > 0))
    keys = torch.arange(count, device=device) - (piece if before else 0)  # relative to the piece's first query
    distance = keys - torch.arange(piece, device=device)[:, None]
    near = (distance >= -before) & (distance <= after)
    place = keys + piece * torch.arange(pieces, device=device)[:, None]
    there = (place >= 0) & (place < pieces * piece)
    return near & there[:, None]
