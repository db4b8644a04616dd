"""`overlapc::claim` returns a flag and clears it: only the first of several backwards then reduces pending gradients.

Which backward is the first is decided at run time.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.graph import Node

from overlapc.fx.versions.sharding import in_backward

_library = torch.library.Library("overlapc", "FRAGMENT")
_library.define("claim(Tensor wanted) -> Tensor")
CLAIM = torch.ops.overlapc.claim.default


class Claimable(Protocol):
    """Pending gradients that a graph may claim in backward."""

    wanted: Tensor
    end_node: Node  # runs at the end of a backward that accumulates all gradients

    def reduce_at_end(self) -> None:
        """Reduce them when the backward that runs has ended."""


# By the address of `wanted`, which is all that a graph knows.
claimable: weakref.WeakValueDictionary[int, Claimable] = weakref.WeakValueDictionary()


@torch.library.impl(_library, "claim", "CompositeExplicitAutograd")
def _claimed_by_graph(wanted: Tensor) -> Tensor:
    """Claim for a graph whose backward runs, unless it drops the reduced gradients: `torch.autograd.grad` and
    `backward(inputs=...)` accumulate only gradients that were asked for."""
    pending = claimable.get(wanted.data_ptr())
    if (
        pending is not None
        and pending.wanted.data_ptr() == wanted.data_ptr()
        and in_backward()
        and not torch._C._will_engine_execute_node(pending.end_node)
    ):
        pending.reduce_at_end()
        return torch.zeros_like(wanted)
    return claimed(wanted)


def claimed(wanted: Tensor) -> Tensor:
    """Return a copy of `wanted`, a single bool, and make it False: only the first of several calls returns True.

    The schema does not say that it is changed, and its version stays: the graphs that saved it shall see the change.
    """
    first = wanted.clone()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(wanted):
        wanted.fill_(False)
    return first


torch.library.register_fake("overlapc::claim", torch.empty_like, lib=_library)
