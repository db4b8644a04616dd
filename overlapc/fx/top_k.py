"""`topk` of long rows, such as a vocabulary's logits: by way of the groups whose largest elements are largest.

    topk(x: [rows, n], k)  ->  tops = amax of each group of neighbours           : [rows, n / group]
                               the groups of topk(tops, k), gathered             : [rows, k * group]
                               topk of these

Each of the k groups has an element that is at least as large as any element of the other groups, so no other is
missed; a NaN is larger than all numbers, also where the smallest elements are asked for. One pass reads the row; both
remaining searches are over about sqrt(k * n) elements.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

LONG_ROW = 2**14  # elements; below, the two searches cost as much as one over the row
_SAVED = 16  # the row must be at least so many times as long as what is searched
_GROUPS = (16, 32, 64, 128)  # neighbours of one group


def topk_of_groups(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """A decomposition of `aten.topk`; NotImplemented, which leaves the op as it is, where that would not pay."""
    group = group_of(x, k, dim)
    if group is None:
        return NotImplemented
    groups = x.unflatten(-1, (x.shape[-1] // group, group))
    tops = groups.amax(-1) if largest else _smallest(groups)
    where = tops.topk(k, -1, largest, sorted=False).indices
    chosen = groups.gather(-2, where.unsqueeze(-1).expand(*where.shape, group))
    values, at = chosen.flatten(-2).topk(k, -1, largest, sorted)
    return values, where.gather(-1, at // group) * group + at % group


def _smallest(groups: Tensor) -> Tensor:
    """The smallest number of each group, and NaN only where there is no number: `amin` would give any NaN."""
    if not groups.is_floating_point():
        return groups.amin(-1)
    missing = groups.isnan()
    numbers = groups.masked_fill(missing, math.inf).amin(-1)
    return numbers.masked_fill(missing.all(-1), math.nan)


def group_of(x: Tensor, k: int, dim: int) -> int | None:
    """The number of neighbours in a group, or None where `x` is better searched as it is."""
    length = x.shape[dim] if x.dim() else 1
    if dim % max(x.dim(), 1) != x.dim() - 1 or not isinstance(length, int) or not isinstance(k, int):
        return None
    if length < LONG_ROW or k == 0:
        return None
    fitting = [group for group in _GROUPS if length % group == 0]
    if not fitting:
        return None
    best = min(fitting, key=lambda group: abs(math.log(group * group * k / length)))
    return best if _SAVED * (length // best + k * best) <= length else None


__all__ = ["topk_of_groups"]
