"""`launcher.c`, built once per machine and kept beside the kernels: one call from Python launches a whole kernel.

Without a C compiler or Python's headers there is none; kernels are then launched through torch's own launcher on a GPU,
and through ctypes on the host.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import platform
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from overlapc.errors import ToolchainError
from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.toolchain import compile_error, find_compiler

DRIVER = "libcuda.so.1"
_NAME = "overlapc_launcher"
_SOURCE = Path(__file__).with_name("launcher.c")
_FLAGS = ("-x", "c", "-std=gnu11", "-O2", "-fPIC", "-shared", "-w")
_log = logging.getLogger("overlapc")


@lru_cache(None)
def launcher_type(cache_dir: Path, driver: str = DRIVER) -> Callable[..., Callable[..., Any]] | None:
    """Makes launchers through the library `driver`; None, logged, where there can be none.

    A launcher takes tensors, and is made of, by keyword: `name`, for errors; `stages`, a tuple of (function in the
    driver, programs, threads, bytes of shared memory); `pointers`, how many tensors it takes; `scratch`, a tuple of
    (size, stride, dtype), which `empty` takes; `data_ptr` of a tensor; `stream_of` a `device`; `otherwise`, called
    with the tensors where one is not aligned to 16 bytes or another device is current than was when it was made.
    """
    module = _module(cache_dir)
    if module is None:
        return None
    try:
        return partial(module.Launcher, module.open_driver(driver))
    except OSError as error:
        _log.info("kernels are launched through torch, at 1 to 2 us more each: %s", error)
        return None


def host_launcher_type(cache_dir: Path) -> Callable[..., Callable[..., None]] | None:
    """Makes launchers of functions on the host; None, logged, where there can be none.

    A launcher takes tensors, then sizes, and is made of, by keyword: `name`, for errors; `function`, the address of one
    that takes an array of 8-byte words (addresses, sizes, threads) and returns the number of a check that failed, or 0;
    `pointers` and `sizes`, how many it takes; `data_ptr` of a tensor; `threads()`, how many it may use; `error`, raised
    with one of `messages`, a tuple, when a check failed.
    """
    module = _module(cache_dir)
    return None if module is None else module.HostLauncher


@lru_cache(None)
def _module(cache_dir: Path) -> ModuleType | None:
    try:
        return _load(_built(cache_dir))
    except (ToolchainError, ImportError, OSError) as error:
        _log.info("kernels are launched from Python, at 1 to 2 us more each: %s", error)
        return None


def _built(cache_dir: Path) -> Path:
    headers = sysconfig.get_path("include")
    # Any C compiler gives the same interface: a warm start need not even find out which there is.
    key = content_key(_SOURCE.read_text(), *_FLAGS, headers, sys.version, platform.machine())

    def build(library: Path) -> None:
        line = [*find_compiler().command, *_FLAGS, f"-I{headers}", "-o", str(library), str(_SOURCE), "-ldl"]
        result = subprocess.run(line, capture_output=True, text=True)
        if result.returncode:
            raise compile_error(line, result.stderr, _SOURCE)

    return KernelCache(cache_dir, "launchers").get_or_build(key, ".so", build)


def _load(library: Path) -> ModuleType:
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(library))
    spec = importlib.util.spec_from_file_location(_NAME, library, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    sys.modules[_NAME] = module
    return module
