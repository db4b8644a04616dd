"""Ends the planning of a script at its first optimizer step, which is run once to find the memory that it needs."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_hooks
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from overlapc.launch.without_gpus import Patches
from overlapc.runtime.optimizer_memory import LiveBytes
from overlapc.runtime.steps import STEPS


class Stepped(BaseException):
    """Raised when the first optimizer has stepped, because later steps repeat the first one. It derives from
    BaseException so that no `except Exception` of the script catches it."""


class FirstUpdate:
    """Ends a script at its first optimizer step. Before that, this optimizer and all others with gradients step once,
    to count their state and the peak memory of the update."""

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}  # graph -> number of calls before the first optimizer step
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # of the script
        self.modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # of the script
        self.peak_bytes = 0
        self.not_counted: dict[str, None] = {}  # classes of optimizers whose state is unknown, with the reason
        self.closures: list[str] = []  # class of the first optimizer, if its `step` gets a closure
        self._began = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Hook the creation of modules and optimizers, and optimizer steps, inside the block."""
        init_optimizer = Optimizer.__init__

        def optimizer_made(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            init_optimizer(optimizer, *args, **kwargs)
            self.optimizers.add(optimizer)

        hooks = (
            register_optimizer_step_pre_hook(self.before_step),
            module_hooks.register_module_module_registration_hook(self.note_module),
            module_hooks.register_module_parameter_registration_hook(self.note_module),
            module_hooks.register_module_buffer_registration_hook(self.note_module),
        )
        with Patches() as patches:
            for hook in hooks:
                patches.callback(hook.remove)
            patches.put(Optimizer, "__init__", optimizer_made)
            yield

    def note_module(self, module: nn.Module, *_: object) -> None:
        """Record a module: the hook for registered submodules, parameters and buffers. Modules that are created while
        Dynamo traces (a slice of a module list) are ignored."""
        if not torch.compiler.is_compiling():
            self.modules.add(module)

    def before_step(self, first: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Let all optimizers step once and end the script: the hook that torch calls before any optimizer steps."""
        if self._began:
            return
        self._began = True
        closure = next((argument for argument in (*args[1:], *kwargs.values()) if callable(argument)), None)
        if closure is not None:
            self.closures.append(type(first).__name__)
            with torch.enable_grad():  # as in `step`
                closure()
        self.calls = {name: calls for name, (calls,) in STEPS.counts.items()}
        others = [optimizer for optimizer in self.optimizers if optimizer is not first]
        with LiveBytes() as live:
            for module in self.modules:
                live.note((*module.parameters(recurse=False), *module.buffers(recurse=False)))
            params = [param for optimizer in (first, *others) for param in _params(optimizer)]
            live.note((*params, *(param.grad for param in params)))
            live.note(value for optimizer in (first, *others) for value in pytree.tree_leaves(dict(optimizer.state)))
            self._step(first, args[1:], kwargs)
            for other in others:
                if any(param.grad is not None for param in _params(other)):
                    self._step(other, (), {})
                else:
                    self.not_counted[f"{type(other).__name__}: no gradients when the first optimizer steps"] = None
        if not self.not_counted:
            self.peak_bytes = live.peak_bytes
        raise Stepped

    def _step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        try:
            optimizer.step(*args, **kwargs)
        except Exception as error:
            message = next(iter(str(error).strip().splitlines()), "")
            self.not_counted[f"{type(optimizer).__name__}: {type(error).__name__}: {message}"] = None
            raise Stepped from error


def _params(optimizer: Optimizer) -> Iterator[Tensor]:
    return (param for group in optimizer.param_groups for param in group["params"])
