"""Makes `backend="overlapc"` known to torch as soon as the package is imported, installed or not.

torch finds an installed backend by its entry point, but two threads that look for one at the same time both register
it, and the second fails (`duplicate name`, torch 2.11 to 2.13). So importing the package registers the backend, once
torch's registry is there: `import overlapc` imports no torch, and what comes first is the user's choice. The import
may also be the entry point's own, in the middle of torch's look-up, which will register what it loaded once more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import wraps
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_REGISTRY = "torch._dynamo.backends.registry"
_NAME = "overlapc"


def overlapc(gm: Any, example_inputs: Sequence[Any], **how: Any) -> Callable[..., Any]:
    """`overlapc.backend.overlapc`, imported when the first graph comes."""
    from overlapc import backend

    return backend.overlapc(gm, example_inputs, **how)


def register_with_torch() -> None:
    """Registers the backend now if torch's registry is imported, otherwise when it will be."""
    if _REGISTRY in sys.modules:
        _register(import_module(_REGISTRY))  # which waits for a thread that is importing it
    else:
        sys.meta_path.insert(0, _Watch())


class _Registered(dict[str, Any]):
    """torch's backends by name, where ours may be registered again: the first to come stays."""

    def __contains__(self, name: object) -> bool:
        return name != _NAME and super().__contains__(name)

    def __setitem__(self, name: str, function: Any) -> None:
        if name == _NAME and name in self.keys():  # `in self` denies it
            return
        super().__setitem__(name, function)


def _register(registry: ModuleType) -> None:
    _prepare_early()
    registry._COMPILER_FNS = _Registered(registry._COMPILER_FNS)  # type: ignore[attr-defined]
    registry.register_backend(overlapc, name=_NAME)


def _prepare_early() -> None:
    """Has `torch.compile` check overlapc's options; without this torch hands them over with the first graph, which is
    30 frames deep in the first call. It also prepares Dynamo for the equal blocks of a model that overlapc shards.

    torch 2.11 to 2.13 keep backend, options and mode in this class. Where it is another, the first graph still checks.
    """
    kept = getattr(sys.modules["torch"], "_TorchCompileWrapper", None)
    if kept is None:
        return
    init = kept.__init__

    @wraps(init)
    def init_and_prepare(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        if getattr(self, "compiler_fn", None) is overlapc:
            from overlapc.options.checked_options import checked_options

            config = checked_options(**getattr(self, "kwargs", {}))
            access = sys.modules.get("overlapc.parallel.access")
            if access is not None and config.trace_once:
                access.replay_equal_blocks()

    kept.__init__ = init_and_prepare


class _Watch(MetaPathFinder):
    """Sees torch's registry being imported, and registers the backend right after that."""

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The registry's own spec, with a loader that registers the backend; None for all other modules."""
        if name != _REGISTRY:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_register(module: ModuleType) -> None:
            load(module)
            _register(module)

        spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec
