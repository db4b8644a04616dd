"""Copies results of collectives out of the shared memory for copies as soon as they have arrived.

    s = all_gather(x); …; w = wait(s); y = f(w); …; z = g(w)
 -> s = all_gather(x); w = wait(s); c = taken_out(w); …; y = f(c); …; z = g(c)

Slots of shared memory are then in use only between a collective's start and the copy right behind it, so collectives
fit into any layout that another graph with the same order of collectives has. This is done only for a graph that does
not fit into that layout otherwise, because each copy costs time.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, fx

from overlapc.fx.node_writer import NodeWriter

_library = torch.library.Library("overlapc", "FRAGMENT")
_library.define("taken_out(Tensor result) -> Tensor")
TAKEN_OUT = torch.ops.overlapc.taken_out.default


@torch.library.impl(_library, "taken_out", "CompositeExplicitAutograd")
def _taken_out(result: Tensor) -> Tensor:
    return result.clone()


torch.library.register_fake("overlapc::taken_out", torch.clone, lib=_library)


def take_out(waits: Iterable[fx.Node]) -> None:
    """Move each wait behind the start whose result it waits for, and let its readers read a copy of its result."""
    for wait in waits:
        (start,) = wait.all_input_nodes
        start.append(wait)
        readers = list(wait.users)
        copied = NodeWriter(wait.next, wait).call(TAKEN_OUT, wait)
        for reader in readers:
            reader.replace_input_with(wait, copied)
