"""Reading a managed parameter: gathered inside forward, sharded everywhere else.

A module that owns managed parameters gets a subclass of its own class with one property a parameter. Inside a
forward (or its repetition by an eager checkpoint in backward) the property gathers; outside it gives the sharded
DTensor parameter, so that initialization, optimizers and checkpoints see what they should.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from overlapc.fx.versions import in_backward
from overlapc.parallel.gather import ShardedParam, ShardGroup, unshard


class _Forward(threading.local):
    depth = 0  # nested calls of group modules on this thread


_forward = _Forward()


class FSDPModule:
    """Mixed into the class of every module given to `fully_shard`: casts around forward and says it runs."""

    _overlapc_group: ShardGroup
    _overlapc_input_dtype: torch.dtype | None
    _overlapc_output_dtype: torch.dtype | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._overlapc_input_dtype is not None:
            args, kwargs = _cast((args, kwargs), self._overlapc_input_dtype)
        # Dynamo always gathers (below); a side effect here would break its checkpoint regions.
        if torch.compiler.is_dynamo_compiling():
            output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        else:
            _forward.depth += 1
            try:
                output = super().__call__(*args, **kwargs)  # type: ignore[misc]
            finally:
                _forward.depth -= 1
        if self._overlapc_output_dtype is not None:
            output = _cast(output, self._overlapc_output_dtype)
        return output


def group_of(module: nn.Module) -> ShardGroup | None:
    """The group that a `fully_shard` call on `module` made, or None."""
    return module.__dict__.get("_overlapc_group")


def managed(module: nn.Module) -> dict[str, ShardedParam]:
    """`module`'s own managed parameters by name."""
    return module.__dict__.get("_overlapc_params", {})


def manage(module: nn.Module, params: dict[str, ShardedParam]) -> None:
    """Let `module`'s parameters named in `params` be gathered on access."""
    if not params:
        return
    module.__dict__["_overlapc_params"] = {**managed(module), **params}
    keys = {name: param.key for name, param in params.items()}
    module.__dict__["_overlapc_keys"] = {**module.__dict__.get("_overlapc_keys", {}), **keys}
    _set_class(module, params, group=False)


def make_group(
    module: nn.Module, group: ShardGroup, input_dtype: torch.dtype | None, output_dtype: torch.dtype | None
) -> None:
    """Let calls of `module` cast their floating inputs and outputs and count as forward."""
    module.__dict__["_overlapc_group"] = group
    module.__dict__["_overlapc_input_dtype"] = input_dtype
    module.__dict__["_overlapc_output_dtype"] = output_dtype
    _set_class(module, (), group=True)


def _set_class(module: nn.Module, names: Iterable[str], group: bool) -> None:
    cls = type(module)
    base: type[nn.Module] = getattr(cls, "_overlapc_base", cls)
    known: frozenset[str] = getattr(cls, "_overlapc_names", frozenset())
    # Classes are hashable; nn.Module's own __hash__ annotation makes mypy doubt it.
    module.__class__ = _subclass(base, known.union(names), group or issubclass(cls, FSDPModule))  # type: ignore[arg-type]


@functools.cache
def _subclass(base: type[nn.Module], names: frozenset[str], group: bool) -> type[nn.Module]:
    bases = (FSDPModule, base) if group else (base,)
    body: dict[str, Any] = {"_overlapc_base": base, "_overlapc_names": names, "__doc__": base.__doc__}
    body.update({name: _property(name) for name in names})
    return type(f"FSDP{base.__name__}", bases, body)


def _property(name: str) -> property:
    def get(self: Any) -> Tensor | None:
        param = self._parameters[name]
        if torch.compiler.is_dynamo_compiling() or _forward.depth or in_backward():
            return unshard(param, self._overlapc_keys[name])
        return param

    return property(get)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, cast, tree)
