"""Runs code as soon as a module is imported, whoever imports it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def when_imported(name: str, then: Callable[[ModuleType], None]) -> None:
    """Call `then` with the module: now if it is imported, otherwise once, right after its import."""
    watch = _Watch(name, then)
    if name in sys.modules:
        then(import_module(name))  # `import_module` waits for a thread that is still importing it
    elif watch not in sys.meta_path:
        sys.meta_path.insert(0, watch)


@dataclass(frozen=True)
class _Watch(MetaPathFinder):
    """Import hook that calls `then` with the module `name` when its code has run."""

    name: str
    then: Callable[[ModuleType], None]

    def find_spec(self, name: str, path: object = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Return the module's own spec with a loader that also calls `then`; None for all other modules."""
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_call(module: ModuleType) -> None:
            load(module)
            self.then(module)

        spec.loader.exec_module = load_and_call  # type: ignore[method-assign]
        return spec
