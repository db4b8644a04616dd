"""Which of two possible fusions is tried first: an earlier one may stand in the way of a later one.

dot + its epilogue  before  row sum + row sum, element-wise + element-wise  before  row sum + element-wise,
and among equals what saves more memory traffic, then what stood closer together.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlapc.ir.body import Body


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """How good a fusion promises to be; the larger is tried first."""

    template: bool  # a matrix product with what is around it: it holds a tile of the result, and takes no other sums
    alike: bool  # both reduce, or neither does: kernels of one kind keep its shape, and more of them can follow
    saved_bytes: int  # of memory traffic: what they share
    closeness: int  # minus the positions between them in the original order


def score(first: Body, second: Body, saved_bytes: int, distance: int) -> Score:
    """Of two kernels that share `saved_bytes` and stand `distance` positions apart."""
    template = _multiplies(first) != _multiplies(second)
    alike = bool(first.reduction) == bool(second.reduction)
    return Score(template, alike, saved_bytes, -distance)


def _multiplies(body: Body) -> bool:
    return bool(body.reduction) and bool(body.dots())
