"""Build and load Python modules written in C; each is built once per machine, and cached with the kernels."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import ModuleType

from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.toolchain import compile_error, find_compiler

_FLAGS = ("-x", "c", "-std=gnu11", "-O2", "-fPIC", "-shared", "-w")


def native_module(name: str, source: Path, cache_dir: Path) -> ModuleType:
    """Return the module `name`, whose source is one C file that uses Python's C interface.

    Raises ToolchainError without a C compiler or Python's headers, and OSError or ImportError if it cannot be loaded.
    """
    if name in sys.modules:
        return sys.modules[name]
    library = _built(source, cache_dir)
    loader = importlib.machinery.ExtensionFileLoader(name, str(library))
    spec = importlib.util.spec_from_file_location(name, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[name] = module
    return module


def _built(source: Path, cache_dir: Path) -> Path:
    headers = sysconfig.get_path("include")
    # Any C compiler gives the same interface, so the compiler is not part of the key: warm starts need not look for it.
    key = content_key(source.read_text(), *_FLAGS, headers, sys.version, platform.machine())

    def build(library: Path) -> None:
        line = [*find_compiler().command, *_FLAGS, f"-I{headers}", "-o", str(library), str(source), "-ldl"]
        result = subprocess.run(line, capture_output=True, text=True)
        if result.returncode:
            raise compile_error(line, result.stderr, source)

    return KernelCache(cache_dir, "launchers").get_or_build(key, ".so", build)
