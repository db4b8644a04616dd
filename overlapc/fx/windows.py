"""Attention within a window of positions, a piece of the sequence at a time.

    scaled_dot_product_attention(q, k, v, attn_mask=|query - key| <= 64)        length**2 scores, most of them masked
 -> windowed_attention(q, k, v, 64, 64, piece=128)                               3 * 128 scores a query

A piece of queries sees the keys of its own piece and, where the window reaches there, of those beside it. Each piece is
one more element of the batch, so any kernel that takes a mask can compute it.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

from overlapc.fx.conditions import AllOf, Condition, NotNegative

SHORTEST_PIECE = 128  # queries that a program of an attention kernel takes
LEAST_SKIPPED = 2  # scores of the whole length over those that are left


@dataclass(frozen=True, slots=True)
class Window:
    """A query sees keys from `before` positions before it to `after` positions after it."""

    before: int
    after: int

    def piece(self, length: int) -> int | None:
        """Positions of a piece of a sequence of `length`; None where pieces spare less than half of the scores."""
        size = -(-max(self.before, self.after, 1) // SHORTEST_PIECE) * SHORTEST_PIECE
        while length % size and size < length:
            size += SHORTEST_PIECE
        seen = size * (1 + (self.before > 0) + (self.after > 0))
        return size if length % size == 0 and LEAST_SKIPPED * seen <= length else None


def window_of(allowed: Condition, query: sympy.Symbol, key: sympy.Symbol) -> Window | None:
    """The window that `allowed` describes, for sequences of one length; None for anything else."""
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
    """Attention of `[batch, heads, length, width]` tensors within a window; a view of `[batch, length, heads, width]`.

    `piece` divides the length, and is at least `before` and `after`.
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
    """Each piece of keys behind that before it and in front of that after it, zeros where there is none."""
    own = x.transpose(1, 2).unflatten(1, (-1, piece))
    parts = [own]
    if before:
        parts.insert(0, F.pad(own[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)))
    if after:
        parts.append(F.pad(own[:, 1:], (0, 0, 0, 0, 0, 0, 0, 1)))
    return torch.cat(parts, 2).flatten(0, 1).transpose(1, 2)


def _mask(pieces: int, piece: int, before: int, after: int, device: torch.device) -> Tensor:
    """`[pieces, piece, keys]`: which of the keys at hand a query sees."""
    count = piece * (1 + (before > 0) + (after > 0))
    keys = torch.arange(count, device=device) - (piece if before else 0)  # from the first query of the piece
    distance = keys - torch.arange(piece, device=device)[:, None]
    near = (distance >= -before) & (distance <= after)
    place = keys + piece * torch.arange(pieces, device=device)[:, None]
    there = (place >= 0) & (place < pieces * piece)
    return near & there[:, None]
