"""A warning for an optimizer that was given a model's parameters before `fully_shard` replaced them."""

from __future__ import annotations

import warnings
import weakref
from typing import Any

from torch import nn
from torch.compiler import is_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

_MARK = "_overlapc_sharded"  # attribute of a replaced parameter: its replacement, and how that is gathered
_SHOWN = 3

_seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_watching = False


def replaced_by(param: nn.Parameter) -> Any:
    """Return what `replace_by` noted for `param`; None if no `fully_shard` has replaced it."""
    return getattr(param, _MARK, None)


def replace_by(param: nn.Parameter, name: str, sharded: Any) -> None:
    """Note that `fully_shard` replaced `param` by `sharded`."""
    global _watching
    setattr(param, _MARK, sharded)
    param._overlapc_name = name  # type: ignore[attr-defined]
    if not _watching:
        _watching = True
        register_optimizer_step_pre_hook(_warn_once)


def _is_replaced(param: nn.Parameter) -> bool:
    sharded = replaced_by(param)
    return sharded is not None and sharded[0] is not param


def _warn_once(optimizer: Optimizer, *_: Any) -> None:
    """Warn at an optimizer's first step about parameters that were replaced, except those that have gradients.

    The optimizer does train a parameter that has a gradient.
    """
    if is_compiling() or optimizer in _seen:  # Dynamo traces hooks of a step that it compiles
        return
    _seen.add(optimizer)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    names = [param._overlapc_name for param in held if _is_replaced(param) and param.grad is None]
    if names:
        shown = ", ".join(names[:_SHOWN]) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
        warnings.warn(
            f"this {type(optimizer).__name__} does not train {len(names)} of its {len(held)} parameters ({shown}):"
            " fully_shard replaced them by sharded parameters, which this optimizer does not hold.\nhint: create the"
            " optimizer after overlapc.fully_shard(model, ...), from model.parameters()",
            stacklevel=4,
        )
