"""Reading a managed parameter: gathered inside forward, sharded everywhere else.

A module that owns managed parameters gets a subclass of its own class with one property a parameter. Inside a
forward (or its repetition by an eager checkpoint in backward) the property gathers; outside it gives the sharded
DTensor parameter, so that initialization, optimizers and checkpoints see what they should.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from overlapc.errors import ConfigError
from overlapc.fx.versions import in_backward
from overlapc.parallel.controls import Controls
from overlapc.parallel.gather import ShardedParam, ShardGroup, reduce_with, unshard, unsynced_leaf

# By the key of a ShardedParam: the sharded parameter, and its full gradient that is not reduced yet.
Pending = dict[str, tuple[DTensor, Tensor]]


class FSDPModule(Controls):
    """Mixed into the class of every module given to `fully_shard`: casts around forward, and marks by its frame that
    one runs."""

    _overlapc_groups: tuple[ShardGroup, ...]
    _overlapc_input_dtype: torch.dtype | None
    _overlapc_output_dtype: torch.dtype | None
    _overlapc_pending: Pending  # gradients that the next forward's backward has to reduce

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._overlapc_input_dtype is not None:
            args, kwargs = _cast((args, kwargs), self._overlapc_input_dtype)
        output = super().__call__(*args, **kwargs)  # type: ignore[misc]
        if self._overlapc_pending and torch.is_grad_enabled():
            output = self._reduce_pending(output)
        if self._overlapc_output_dtype is not None:
            output = _cast(output, self._overlapc_output_dtype)
        return output

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether forwards from now on reduce their gradients in backward; FSDP2's method of this name.

            model.set_requires_gradient_sync(False)   # before all micro-batches of a step but the last
            model.set_requires_gradient_sync(True)    # before the last one's forward

        Without, gradients add up unsharded, in the reduce dtype and in memory of their own. The next forward of
        this module that runs with it on takes them along: its backward reduces the sum.
        """
        assert isinstance(self, nn.Module)
        modules = list(self.modules()) if recurse else [self]
        if requires_gradient_sync:
            self._overlapc_pending = {**self._overlapc_pending, **_take_unsynced(modules)}
        else:
            _keep_unsynced(modules)

    def _reduce_pending(self, output: Any) -> Any:
        """`output` with the reduction of pending gradients behind the first tensor in it that backward starts from."""
        leaves, tree = pytree.tree_flatten(output)
        for at, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                keys, pending = list(self._overlapc_pending), list(self._overlapc_pending.values())
                leaves[at] = reduce_with(leaf, [shard for shard, _ in pending], keys, [grad for _, grad in pending])
                self._overlapc_pending = {}
                break
        return pytree.tree_unflatten(leaves, tree)


@contextmanager
def no_sync(module: FSDPModule) -> Iterator[None]:
    """Within, forwards leave their gradients unreduced; see `FSDPModule.set_requires_gradient_sync`.

    with overlapc.no_sync(model):
        step(*first).backward()
    step(*last).backward()                    # reduces the gradients of both
    """
    sync = getattr(module, "set_requires_gradient_sync", None)  # torch.compile's wrapper passes it on
    if sync is None:
        raise ConfigError(
            f"no_sync: this {type(module).__name__} was given to neither overlapc.fully_shard nor overlapc.adopt_fsdp2;"
            " give it the outermost module that was"
        )
    sync(False)
    try:
        yield
    finally:
        sync(True)


def groups_of(module: nn.Module) -> tuple[ShardGroup, ...] | None:
    """The groups that a `fully_shard` call on `module` made, one for each mesh; None if there was no such call."""
    return module.__dict__.get("_overlapc_groups")


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
    module.__dict__.setdefault("_overlapc_unsynced", {})
    _set_class(module, params, group=False)


def make_group(
    module: nn.Module,
    groups: Sequence[ShardGroup],
    input_dtype: torch.dtype | None,
    output_dtype: torch.dtype | None,
    part: int = 0,
) -> None:
    """Let calls of `module` cast their floating inputs and outputs and count as forward.

    groups: one for each mesh that parameters of `module` lie on, none if it has no parameters. part: which of the
    groups' modules it is.
    """
    module.__dict__["_overlapc_groups"] = tuple(groups)
    module.__dict__["_overlapc_part"] = part
    module.__dict__["_overlapc_input_dtype"] = input_dtype
    module.__dict__["_overlapc_output_dtype"] = output_dtype
    module.__dict__["_overlapc_pending"] = {}
    _set_class(module, (), group=True)


def name_groups(root: nn.Module) -> None:
    """Let every group at or below `root` know the paths of its modules."""
    for path, module in root.named_modules():
        for group in groups_of(module) or ():
            group.paths[module.__dict__["_overlapc_part"]] = path


def _keep_unsynced(modules: Iterable[nn.Module]) -> None:
    """Let gradients of the modules' parameters add up in leaves, with those that wait to be reduced."""
    modules = list(modules)
    pending: Pending = {}
    for module in modules:
        if isinstance(module, FSDPModule):
            pending.update(module._overlapc_pending)
            module._overlapc_pending = {}
    leaves: dict[str, Tensor] = {}  # tied parameters share one
    for module in modules:
        for name, sharded in managed(module).items():
            param = module._parameters[name]
            unsynced = module.__dict__["_overlapc_unsynced"]
            if param is None or not param.requires_grad or name in unsynced:
                continue
            if sharded.key not in leaves:
                leaves[sharded.key] = unsynced_leaf(param, sharded.key)
                leaves[sharded.key].grad = pending[sharded.key][1] if sharded.key in pending else None
            unsynced[name] = leaves[sharded.key]


def _take_unsynced(modules: Iterable[nn.Module]) -> Pending:
    """Stop that; what has added up."""
    taken: Pending = {}
    for module in modules:
        unsynced = module.__dict__.get("_overlapc_unsynced", {})
        for name, leaf in unsynced.items():
            if leaf.grad is not None:
                taken[managed(module)[name].key] = (module._parameters[name], leaf.grad)  # type: ignore[assignment]
        unsynced.clear()
    return taken


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
        if torch.compiler.is_dynamo_compiling() or _in_forward() or in_backward():
            return unshard(param, self._overlapc_keys[name], self._overlapc_unsynced.get(name))
        return param

    return property(get)


def _in_forward() -> bool:
    """Whether the reader of a parameter was called, at whatever depth, by a `FSDPModule.__call__`.

    A counter that `__call__` keeps would miss what runs eagerly behind a graph break: the frame with the break is
    compiled code then, in which nothing may be counted (a side effect would break Dynamo's checkpoint regions). But it
    still is a frame of this file, as is what Dynamo resumes after the break.
    """
    frame = sys._getframe(2)  # 0: this function, 1: the property
    while frame is not None:
        if frame.f_code.co_filename == __file__:
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return pytree.tree_map_only(Tensor, cast, tree)
