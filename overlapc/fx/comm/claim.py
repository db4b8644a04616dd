"""`overlapc::claim` returns a flag and clears it: only the first of several backwards then reduces pending gradients.

Which backward is the first is decided at run time.
"""

from __future__ import annotations

import torch
from torch import Tensor

_library = torch.library.Library("overlapc", "FRAGMENT")
_library.define("claim(Tensor wanted) -> Tensor")
CLAIM = torch.ops.overlapc.claim.default


@torch.library.impl(_library, "claim", "CompositeExplicitAutograd")
def claimed(wanted: Tensor) -> Tensor:
    """Return a copy of `wanted`, a single bool, and make it False: only the first of several calls returns True.

    The schema does not say that it is changed, and its version stays: the graphs that saved it shall see the change.
    """
    first = wanted.clone()
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(wanted):
        wanted.fill_(False)
    return first


torch.library.register_fake("overlapc::claim", torch.empty_like, lib=_library)
