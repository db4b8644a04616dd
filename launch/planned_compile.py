"""Replaces torch.compile while a script is planned: graphs of any backend are planned, and FSDP2 is adopted first."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import fsdp

from overlapc import backend, registration
from overlapc.compilation.preparation import prepare_torch
from overlapc.config import Config
from overlapc.errors import shown
from overlapc.launch.without_gpus import Patches
from overlapc.parallel import FSDPModule, adopt_fsdp2

_CALL = "__call__"
_OURS = ("overlapc", registration.overlapc, backend.overlapc)  # what a script may give as torch.compile's backend
_torch_compile = torch.compile


class PlannedCompile:
    """The compilations of one script. options: override those that the script gives to overlapc."""

    def __init__(self, options: Config) -> None:
        self.adopted: list[nn.Module] = []
        self.by_blocks: list[int] = []  # for each FSDP2 module, the number of its blocks that were compiled one by one
        self.given_empty = False  # whether a graph was called with an empty tensor that is not a parameter
        self.options_of_script: dict[str, None] = {}  # NAME=VALUE that graphs were planned with, in order
        self._options = options
        self._modules: Any = ()
        self._unadopted: dict[nn.Module, dict[str, Any]] = {}  # compiled before FSDP2 managed it -> compile arguments

    @contextlib.contextmanager
    def instead_of_torch(self, modules: Any) -> Iterator[None]:
        """Replace torch.compile and Module.compile by those of this object inside the block.

        modules: all modules that the script has created so far.
        """
        global _current
        self._modules = modules
        with Patches() as patches:
            patches.put(torch, "compile", _compile)
            patches.put(nn.Module, "compile", lambda module, *_args, **given: self.compile_in_place(module, given))
            patches.callback(_watch_no_call)
            _current = self
            try:
                yield
            finally:
                _current = None

    def compile(self, model: Any = None, **given: Any) -> Any:
        """Replaces torch.compile."""
        if model is None:
            return partial(self.compile, **given)
        if isinstance(model, nn.Module) and _is_of_fsdp2(model):
            self._adopt(model)
        prepare_torch(self._options)
        of_another = {} if given.get("backend") in _OURS else {"mode": None, "options": None}
        made = _torch_compile(model, **{**given, "backend": self._plan, **of_another})
        if isinstance(made, nn.Module) and not any(isinstance(module, fsdp.FSDPModule) for module in made.modules()):
            self._unadopted[made] = given  # it may be a block of a module that is sharded later
            self._watch_first_call()
        return made

    def compile_in_place(self, module: nn.Module, given: dict[str, Any]) -> None:
        """Replaces Module.compile."""
        self._unadopted[module] = given
        self._watch_first_call()
        if _is_of_fsdp2(module) and not fsdp2_manages(module):
            self._adopt(module)
        module._compiled_call_impl = self.compile(module._call_impl, **given)

    def _plan(
        self,
        gm: torch.fx.GraphModule,
        example_inputs: Any,
        options: Mapping[str, Any] | Config | None = None,
        mode: str | None = None,
    ) -> Any:
        """Plan one graph: the backend of the script's compilations. options, mode: those that the script gave."""
        self.given_empty |= any(
            isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and _is_empty(value)
            for value in example_inputs
        )
        config = Config(**{**Config.of(options, mode).given, **self._options.given})
        own = options.given if isinstance(options, Config) else options or {}
        taken = {**({"mode": mode} if mode else {}), **own}
        self.options_of_script |= {
            f"{name}={shown(value)}": None for name, value in taken.items() if name not in self._options.given
        }
        return backend.plan_only(gm, example_inputs, options=config)

    def _adopt(self, module: nn.Module) -> None:
        self.adopted.append(adopt_fsdp2(module))
        within = set(module.modules())
        for made in [compiled for compiled in self._unadopted if getattr(compiled, "_orig_mod", compiled) in within]:
            del self._unadopted[made]  # Fabric compiles a model again after sharding it
        if not self._unadopted:
            _watch_no_call()

    def _watch_first_call(self) -> None:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            _watch_no_call()  # before the call below, in which Dynamo would trace the hook
            self._before_first_call()
            return module(*args, **kwargs)

        setattr(fsdp.FSDPModule, _CALL, call)

    def _before_first_call(self) -> None:
        """Adopt the outermost FSDP2 modules that were compiled or that contain compiled blocks; called before any FSDP2
        module runs. Blocks that are compiled one by one are planned as if the whole module were compiled."""
        managed = [module for module in self._modules if fsdp2_manages(module)]
        inner = {module for outer in managed for module in outer.modules() if module is not outer}
        for outer in managed:
            blocks = [module for module in outer.modules() if module in self._unadopted]
            if outer in inner or not blocks:
                continue
            for block in blocks:
                block._compiled_call_impl = None
            self.adopted.append(adopt_fsdp2(outer))
            if outer not in self._unadopted:
                self.by_blocks.append(len(blocks))
            how = self._unadopted.get(outer, self._unadopted[blocks[0]])
            outer._compiled_call_impl = self.compile(outer._call_impl, **how)


_current: PlannedCompile | None = None


def _compile(model: Any = None, **given: Any) -> Any:
    """Replaces torch.compile while a script is planned. Lightning calls it even later; then it is torch's."""
    return _torch_compile(model, **given) if _current is None else _current.compile(model, **given)


def _watch_no_call() -> None:
    if _CALL in fsdp.FSDPModule.__dict__:
        delattr(fsdp.FSDPModule, _CALL)


def _is_empty(tensor: Tensor) -> bool:
    return any(isinstance(size, int) and size == 0 for size in tensor.shape)


def _is_of_fsdp2(model: nn.Module) -> bool:
    """Whether `model` contains modules that FSDP2 manages: compiled like that, no communication is in its graphs."""
    return any(map(fsdp2_manages, model.modules()))


def fsdp2_manages(module: nn.Module) -> bool:
    """Whether FSDP2's hooks gather and reduce the module's parameters; an adopted module has none."""
    return isinstance(module, fsdp.FSDPModule) and not isinstance(module, FSDPModule)
