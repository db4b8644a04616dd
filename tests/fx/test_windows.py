"""Attention within a window, computed for one piece of the sequence at a time, equals attention with a mask."""

from __future__ import annotations

from pathlib import Path

import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import Tensor

import overlapc
from overlapc.fx.masks.conditions import AllOf, AnyOf, NotNegative
from overlapc.fx.masks.windows import SHORTEST_PIECE, Window, window_of, windowed_attention
from overlapc.runtime.counters import counted

LENGTH = 4 * SHORTEST_PIECE


def inputs(heads: int = 2, width: int = 8, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return query, key and value as models pass them: (batch, heads, tokens, width), with tokens first in memory."""
    torch.manual_seed(0)
    made = (torch.randn(2, LENGTH, heads, width, dtype=dtype).transpose(1, 2) for _ in range(3))
    return [each.requires_grad_() for each in made]


def masked(query: Tensor, key: Tensor, value: Tensor, before: int, after: int, scale: float | None = None) -> Tensor:
    at = torch.arange(query.shape[-2])
    mask = (at >= at[:, None] - before) & (at <= at[:, None] + after)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


def same(one: Tensor, other: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(one, other)
    gradient = torch.randn(one.shape)
    for mine, theirs in zip(*(torch.autograd.grad(each, leaves, gradient) for each in (one, other)), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize(("before", "after"), [(100, 0), (SHORTEST_PIECE, 0), (0, 64), (64, 64), (1, 128)])
def test_attention_by_pieces_equals_masked_attention_forward_and_backward(before: int, after: int) -> None:
    leaves = inputs()
    piece = SHORTEST_PIECE
    made = windowed_attention(*leaves, before, after, piece=piece, scale=0.3)
    same(made, masked(*leaves, before, after, 0.3), leaves)
    assert made.transpose(1, 2).is_contiguous()


def test_a_piece_divides_the_length_and_saves_half_of_the_scores() -> None:
    assert Window(511, 0).piece(4096) == 512
    assert Window(64, 64).piece(2048) == 128
    assert Window(300, 0).piece(4 * 320) is None  # 384 does not divide the length, 640 saves nothing
    assert Window(1023, 0).piece(2048) is None
    assert Window(2, 0).piece(16) is None


def test_only_a_constant_lower_bound_below_the_diagonal_makes_a_window() -> None:
    i, j = (sympy.Symbol(name, integer=True, nonnegative=True) for name in "ij")
    causal, near = NotNegative(i - j), NotNegative(j - i + 7)
    assert window_of(AllOf(frozenset((causal, near))), i, j) == Window(7, 0)
    assert window_of(AllOf(frozenset((NotNegative(i - j + 2), near))), i, j) == Window(7, 2)
    size = sympy.Symbol("s0", integer=True, positive=True)
    for other in (
        causal,
        True,
        AnyOf(frozenset((causal, near))),
        AllOf(frozenset((causal, NotNegative(i - 3)))),
        AllOf(frozenset((causal, NotNegative(j - i + size)))),
        AllOf(frozenset((causal, NotNegative(j - i - 1)))),
        AllOf(frozenset((causal, near, NotNegative(j - 2)))),
    ):
        assert window_of(other, i, j) is None


def test_a_step_computes_a_window_by_pieces_and_the_report_says_so(cache: Path) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at = torch.arange(query.shape[-2])
        mask = (at[:, None] >= at) & (at[:, None] - at < 100)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask[None, None])
        return mixed.transpose(1, 2).contiguous().flatten(2)

    leaves = inputs()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(attend, backend="overlapc", options={"cache_dir": str(cache)}, dynamic=False)
    same(compiled(*leaves), attend(*leaves), leaves)
    assert counted("attention_masks_windows") == 1
    assert f"its mask is a window, in pieces of {SHORTEST_PIECE}" in str(overlapc.report())


def test_the_result_has_the_dim_order_of_eager() -> None:
    """Torch computes values of another width by separate products, whose result is contiguous."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        at = torch.arange(LENGTH)
        near = (at <= at[:, None]) & (at > at[:, None] - 5)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=near).view(2, -1)

    query, key, value = inputs()
    compiled = torch.compile(attend, backend="overlapc", fullgraph=True)
    same(compiled(query, key, value[..., :4]), attend(query, key, value[..., :4]), [query, key, value])
