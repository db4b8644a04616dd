"""The order in which fusions are tried, because an early fusion may prevent a later one.

dot + its epilogue  before  row sum + row sum, element-wise + element-wise  before  row sum + element-wise.
Among equals, the fusion that saves more memory traffic comes first, then the one whose kernels are closer together.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlapc.ir.body import Body


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """The expected benefit of a fusion; larger scores are tried first."""

    template: bool  # a matrix product with a neighbour, because its kernel can contain no other reduction
    alike: bool  # both reduce, or neither does: the fused kernel is of the same kind, so more kernels can fuse with it
    saved_bytes: int  # bytes of memory traffic saved: the buffers that both access
    closeness: int  # minus the positions between them in the original order


def score(first: Body, second: Body, saved_bytes: int, distance: int) -> Score:
    """Return the score of two kernels that share `saved_bytes` and are `distance` positions apart."""
    template = _multiplies(first) != _multiplies(second)
    alike = bool(first.reduction) == bool(second.reduction)
    return Score(template, alike, saved_bytes, -distance)


def _multiplies(body: Body) -> bool:
    return bool(body.reduction) and bool(body.dots())
