"""Parameters that stay gathered across several calls: from `unshard()` to `reshard()`, as in FSDP2.

They serve code that runs eagerly, such as a head that is called once for each part of a sequence. Compiled code gathers
parameters within its graph, where the compiler hides the collective. As with FSDP2, a forward frees the gathered
parameters if its group reshards after forward, and a backward does unless `set_reshard_after_backward(False)` was
called. A shard that has changed is gathered again.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch.distributed.tensor import DTensor

from overlapc.parallel.controls import modules_of
from overlapc.parallel.gather import GatheredParam
from overlapc.parallel.unreduced import managed


def unshard(module: Any) -> None:
    """Gather the parameters of `module`'s groups and keep them, by one collective each: call it on all ranks."""
    gathered: dict[str, GatheredParam] = {}  # by parameter key, which tied parameters share
    after_backward = _Resharding(module)
    for owner in modules_of(module, recurse=False):
        for name, sharded in managed(owner).items():
            param = owner._parameters[name]
            if not isinstance(param, DTensor):
                continue
            now = gathered.get(sharded.key) or owner.__dict__["_overlapc_gathered"].get(name)
            if now is None or not now.is_current(param):
                now = GatheredParam(param, sharded.key, after_backward)
            gathered[sharded.key] = owner.__dict__["_overlapc_gathered"][name] = now


def reshard(module: Any) -> None:
    """Free the parameters that `unshard` gathered."""
    for owner in modules_of(module, recurse=False):
        owner.__dict__.get("_overlapc_gathered", {}).clear()


def reshard_after_forward(module: Any) -> None:
    """Call `reshard` at the end of a forward of `module` if its groups reshard after forward."""
    if any(group.reshard for group in module._overlapc_groups):
        reshard(module)


def gathered_of(owner: Any, name: str) -> GatheredParam | None:
    """Return the gathered parameter of `owner`, gathered again if its shard has changed; None without `unshard`."""
    gathered: GatheredParam | None = owner._overlapc_gathered.get(name)
    if gathered is None:
        return None
    param = owner._parameters[name]
    if not gathered.is_current(param):
        gathered = owner._overlapc_gathered[name] = GatheredParam(
            param, owner._overlapc_keys[name], gathered.after_backward
        )
    return gathered


class _Resharding:
    """Callback for the end of a backward that used gathered parameters of `module`; frees them unless told not to."""

    def __init__(self, module: Any) -> None:
        self.module = weakref.ref(module)

    def __call__(self) -> None:
        module = self.module()
        if module is not None and module.__dict__.get("_overlapc_reshard_after_backward", True):
            reshard(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Resharding:
        return _Resharding(memo.get(id(self.module()), self.module()))
