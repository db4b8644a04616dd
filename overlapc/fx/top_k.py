"""`topk` of long rows, such as a vocabulary's logits: searches only the groups with the largest maxima.

    topk(x: [rows, n], k)  ->  tops = amax of each group of neighbours           : [rows, n / group]
                               the groups of topk(tops, k), gathered             : [rows, k * group]
                               topk of the gathered elements

Each of the k groups has an element that is at least as large as any element of the other groups, so the result is in
these groups. A NaN counts as larger than all numbers, also when the smallest elements are searched. One pass reads the
row; the two searches that remain are over about sqrt(k * n) elements.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

LONG_ROW = 2**14  # elements; in shorter rows, the two searches cost as much as one search of the row
_SAVED = 16  # least ratio of the row's length to the number of elements that are searched
_GROUPS = (16, 32, 64, 128)  # neighbouring elements in a group


def topk_of_groups(x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    """Decompose `aten.topk`; return NotImplemented, which leaves the op as it is, if that would not be faster."""
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
    """Return the smallest number of each group; NaN only for a group of NaNs (`amin` gives NaN if there is one)."""
    if not groups.is_floating_point():
        return groups.amin(-1)
    missing = groups.isnan()
    numbers = groups.masked_fill(missing, math.inf).amin(-1)
    return numbers.masked_fill(missing.all(-1), math.nan)


def group_of(x: Tensor, k: int, dim: int) -> int | None:
    """Return the number of elements in a group, or None if searching `x` itself is better."""
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
