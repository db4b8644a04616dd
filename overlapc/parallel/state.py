"""The part of FSDP2's module state that torch's own code reads, for modules sharded or adopted by overlapc.

Through it `torch.distributed.pipelining` reduces gradients after the last micro-batch, and methods that were given to
`register_fsdp_forward_method` count as forwards. Models of NeMo Automodel read their mixed precision policy from it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from overlapc.parallel import gathered
from overlapc.parallel.unreduced import reduce_all


class ModuleState:
    """The state of one sharded module; also used as its only parameter group and as the context of all modules."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._method: gathered.Method | None = None  # between `_pre_forward` and `_post_forward`, or an exception

    @property
    def _mp_policy(self) -> MixedPrecisionPolicy:  # models read their dtypes from it
        policy: MixedPrecisionPolicy = self._module.__dict__["_overlapc_policy"]
        return policy

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
    def _fsdp_param_group(self) -> ModuleState:  # torch 2.11's pipelines read this name
        return self

    def post_backward(self) -> None:
        """Reduce the gradients that earlier micro-batches left unreduced."""
        reduce_all(self._module._overlapc_pending.take())
        if self._module.__dict__.get("_overlapc_reshard_after_backward", True):
            gathered.reshard(self._module)

    def _root_post_backward_final_callback(self) -> None:
        """Do nothing: each reduction is waited for where it is made."""

    def _lazy_init(self) -> None:
        """Do nothing: modules are complete after `fully_shard`."""

    def _pre_forward(self, module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if not torch.compiler.is_dynamo_compiling():  # a graph gathers parameters where they are read
            self._method = gathered.Method(module)
            args, kwargs = self._method.watched(args, kwargs)
        return module._before_forward(args, kwargs)

    def _post_forward(self, module: Any, args: Any, output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            output = module._reduce_pending(output)
        else:
            assert self._method is not None
            output = self._method.ended(output)
        return module._with_output_dtype(output)
