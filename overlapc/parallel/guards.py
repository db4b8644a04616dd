"""A filter for Dynamo's guards, which keeps those that a sharded model needs.

    torch.compile(model, backend="overlapc", options={"guard_filter_fn": overlapc.trust_modules})

Before each call of a compiled model Dynamo checks its guards. It skips modules of plain tensors while none of their
dictionaries changed. But at every call it checks each parameter that is a DTensor, and each hook that tensor
parallelism registered, and each of these checks takes the host longer than launching a kernel.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._dynamo.types import GuardFilterEntry

_INSIDE = re.compile(r"\._parameters\[[^]]*\]\.|\._forward_(pre_)?hooks\[")


def trust_modules(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """Drop guards on the inside of parameters and hooks; for `torch.compile(options={"guard_filter_fn": …})`.

    The set of modules and parameters, flags such as `training`, and the number of hooks stay guarded. The caller
    promises that existing hooks do not change. If a DTensor is frozen, or replaced by one of other placements, dtype or
    device, after the step was compiled, the call raises LayoutError where it would have recompiled.
    """
    return [_INSIDE.search(guard.name) is None for guard in guards]
