"""Which of Dynamo's guards a sharded model needs.

    torch.compile(model, backend="overlapc", options={"guard_filter_fn": overlapc.trust_modules})

Before each call of a compiled model Dynamo checks its guards. It skips modules of plain tensors while none of their
dictionaries changed, but checks each parameter that is a DTensor, and each hook that tensor parallelism registered, at
every call, which takes the host longer than launching a kernel for each.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._dynamo.types import GuardFilterEntry

_INSIDE = re.compile(r"\._parameters\[[^]]*\]\.|\._forward_(pre_)?hooks\[")


def trust_modules(guards: Sequence[GuardFilterEntry]) -> list[bool]:
    """For `torch.compile(options={"guard_filter_fn": …})`: drops guards on the inside of parameters and hooks.

    Still guarded: which modules, parameters and flags such as `training` there are, and the number of hooks. The caller
    promises that existing hooks do not change. A DTensor that was replaced by one of other
    placements, dtype or device, or frozen, since the step was compiled is a LayoutError in place of a recompilation.
    """
    return [_INSIDE.search(guard.name) is None for guard in guards]
