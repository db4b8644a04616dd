"""Which of Dynamo's guards a sharded model needs.

    torch.compile(model, backend="overlapc", options={"guard_filter_fn": overlapc.trust_modules})

Before each call of a compiled model Dynamo compares what it depends on with what it was. Modules of plain tensors are
passed over while none of their dictionaries changed; but into each parameter that is a DTensor, and into each hook that
tensor parallelism registered, it looks every time, which takes a host longer than launching a kernel for each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._dynamo.types import GuardFilterEntry

_INSIDE = re.compile(r"\._parameters\[[^]]*\]\.|\._forward_(pre_)?hooks\[")


def trust_modules(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """For `torch.compile(options={"guard_filter_fn": …})`: drops the guards inside of modules' parameters and hooks.

    What stays guarded: which modules there are and what they hold, parameters, flags such as `training`, the number of
    hooks. What you promise: that hooks which are there stay what they are. A DTensor that was replaced by one of other
    placements, dtype or device, or frozen, since the step was compiled is a LayoutError in place of a recompilation.
    """
    return [_INSIDE.search(guard.name) is None for guard in guards]
