"""Makes `backend="overlapc"` known to torch as soon as the package is imported, installed or not.

torch finds an installed backend by its entry point, but two threads that look for one at the same time both register
it, and the second fails (`duplicate name`, torch 2.11 to 2.13). So importing the package registers the backend, as soon
as torch's registry is imported: `import overlapc` does not import torch, and the user may import either first. If
torch's own look-up of the entry point imports overlapc, torch registers the backend a second time afterwards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from types import ModuleType
from typing import Any

from overlapc.when_imported import when_imported

_NAME = "overlapc"


def overlapc(gm: Any, example_inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
    """Call `overlapc.backend.overlapc`, which is imported with the first graph."""
    from overlapc import backend

    return backend.overlapc(gm, example_inputs, **how)


def register_with_torch() -> None:
    """Register the backend now if torch's registry is imported, otherwise as soon as it is."""
    when_imported("torch._dynamo.backends.registry", _register)


class _Registered(dict[str, Any]):
    """torch's backends by name; registering overlapc again is no error, and keeps the first registration."""

    def __contains__(self, name: object) -> bool:
        return name != _NAME and super().__contains__(name)

    def __setitem__(self, name: str, function: Any) -> None:
        if name == _NAME and name in self.keys():  # `in self` is always false for it
            return
        super().__setitem__(name, function)


def _register(registry: ModuleType) -> None:
    _prepare_early()
    registry._COMPILER_FNS = _Registered(registry._COMPILER_FNS)  # type: ignore[attr-defined]
    registry.register_backend(overlapc, name=_NAME)


def _prepare_early() -> None:
    """Make `torch.compile` check overlapc's options, and call `prepare_torch`; otherwise options are first checked when
    the first graph is compiled, 30 frames deep in the first call.

    torch 2.11 to 2.13 keep backend, options and mode in `_TorchCompileWrapper`. In a torch without this class, options
    are still checked with the first graph.
    """
    compile_wrapper = getattr(sys.modules["torch"], "_TorchCompileWrapper", None)
    if compile_wrapper is None:
        return
    init = compile_wrapper.__init__

    @wraps(init)
    def init_and_prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if getattr(self, "compiler_fn", None) is overlapc:
            from overlapc.compilation.preparation import prepare_torch
            from overlapc.options.checked_options import checked_options

            prepare_torch(checked_options(**getattr(self, "kwargs", {})))

    compile_wrapper.__init__ = init_and_prepare
