"""What torch's own callers read of FSDP2's state of a module, for modules sharded or adopted by overlapc.

`torch.distributed.pipelining` reduces gradients after the last micro-batch through it, and methods that
`register_fsdp_forward_method` registered count as forwards.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule

from overlapc.parallel import gathered
from overlapc.parallel.unreduced import reduce_all


class ModuleState:
    """The state of one sharded module; it is also its only parameter group, and the context that all modules share."""

    def __init__(self, module: Any) -> None:
        self._module = module

    @property
    def _state_ctx(self) -> ModuleState:
        return self

    @property
    def all_states(self) -> list[ModuleState]:
        return [ModuleState(each) for each in self._module.modules() if isinstance(each, FSDPModule)]

    @property
    def _fsdp_param_groups(self) -> list[ModuleState]:
        return [self]

    @property
    def _fsdp_param_group(self) -> ModuleState:  # what torch 2.11's pipelines ask for
        return self

    def post_backward(self) -> None:
        """Reduce, now, the gradients of micro-batches whose backward left them."""
        reduce_all(self._module._overlapc_pending)
        if self._module.__dict__.get("_overlapc_reshard_after_backward", True):
            gathered.reshard(self._module)

    def _root_post_backward_final_callback(self) -> None:
        """Does nothing: reductions are waited for where they are made."""

    def _lazy_init(self) -> None:
        """Does nothing: modules are complete after `fully_shard`."""

    def _pre_forward(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        gathered.unshard(module)
        return module._cast_inputs(args, kwargs)

    def _post_forward(self, module: Any, args: Any, output: Any) -> Any:
        gathered.reshard(module)
        return output
