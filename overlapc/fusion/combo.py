"""Kernels of one kind over many tensors in one launch: an optimizer's step, the norms of all gradients, their casts.

What they share is the launch, not memory traffic, so they combine last, and only where nothing is lost by it: neither
needs the other, no library call or communication runs between them (a gradient's cast would wait for the next
gradient, and its reduction with it), and the peak of memory stays where it is.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

import torch

from overlapc.ir.body import Body
from overlapc.ir.hazards import scatters
from overlapc.ir.ops import Extern, IROp, Loops, Start, Wait
from overlapc.ir.template import SIZE, template_of
from overlapc.lowering.table import LIBRARY_CALLS

if TYPE_CHECKING:
    from overlapc.fusion.fuse import Fuser

MOST_POINTERS = 240  # buffers of one launch: a CUDA kernel has 4 KiB for its arguments
MOST_OPEN = 8  # launches of one kind that a kernel may choose from: keeps attempts linear

Kind = tuple[int, torch.device, Body]


def combine(fuser: Fuser) -> None:
    """Puts kernels of `fuser` into launches of several, each into the first of its kind that may take it."""
    stretch = _stretches(fuser)
    rough = Counter((stretch[number], rough_kind(group.op)) for number, group in fuser.groups.items())
    launches: defaultdict[Kind, list[int]] = defaultdict(list)
    for number in fuser.order.order():
        op = fuser.groups[number].op
        if not isinstance(op, Loops) or rough[stretch[number], rough_kind(op)] < 2 or not _may_combine(op.body):
            continue
        template = template_of(op.body).body
        if set(template.size_symbols()) - {SIZE}:
            continue  # how many programs a part takes must be known now
        open_ones = launches[stretch[number], op.device, template]
        for at, launch in enumerate(open_ones[:MOST_OPEN]):
            if fuser.try_combine(launch, number):
                open_ones[at] = min(launch, number)
                break
        else:
            open_ones.append(number)


def _stretches(fuser: Fuser) -> dict[int, int]:
    """For each group, how many library calls and communications stand before it."""
    found: dict[int, int] = {}
    passed = 0
    for number in fuser.order.order():
        passed += _divides(fuser.groups[number].op)
        found[number] = passed
    return found


def _divides(op: IROp) -> bool:
    if isinstance(op, Extern):
        return op.comm is not None or op.target in LIBRARY_CALLS
    return isinstance(op, Start | Wait)


def rough_kind(op: IROp) -> tuple[int, ...]:
    """Cheap to compute, and equal for kernels of one kind."""
    if not isinstance(op, Loops):
        return ()
    body = op.body
    return len(body.values()), len(body.stores), len(body.loops), len(body.reduction)


def _may_combine(body: Body) -> bool:
    """Totals need a launch after them, scatters go by where they write, a check names the kernel it failed in.

    A matrix product is a launch of its own.
    """
    if body.checks() or body.dots() or scatters(body):
        return False
    return not any(store.is_total for store in body.stores)
