"""The order in which fusions are tried: an early one may prevent a later one.

dot + its epilogue  before  row sum + row sum, element-wise + element-wise  before  row sum + element-wise,
and among equals the one that saves more memory traffic, then the one whose kernels are closer together.
"""

from __future__ import annotations

from dataclasses import dataclass

from overlapc.ir.body import Body


@dataclass(frozen=True, slots=True, order=True)
class Score:
    """How good a fusion promises to be; the larger is tried first."""

    template: bool  # a matrix product with its neighbours: its kernel holds a tile, and no other reductions
    alike: bool  # both reduce, or neither does: the fused kernel keeps its kind, so that more kernels can fuse with it
    saved_bytes: int  # bytes of memory traffic saved: the buffers that both access
    closeness: int  # minus the positions between them in the original order


def score(first: Body, second: Body, saved_bytes: int, distance: int) -> Score:
    """Of two kernels that share `saved_bytes` and stand `distance` positions apart."""
    template = _multiplies(first) != _multiplies(second)
    alike = bool(first.reduction) == bool(second.reduction)
    return Score(template, alike, saved_bytes, -distance)


def _multiplies(body: Body) -> bool:
    return bool(body.reduction) and bool(body.dots())
