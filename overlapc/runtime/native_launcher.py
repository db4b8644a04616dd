"""Build and load `launcher.c`, with which one call from Python launches a whole kernel; built once per machine.

Without a C compiler or Python's headers it cannot be built; kernels are then launched through torch's own launcher on a
GPU, and through ctypes on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any

from overlapc.errors import ToolchainError
from overlapc.runtime.native_module import native_module

DRIVER = "libcuda.so.1"
_log = logging.getLogger("overlapc")


@lru_cache(None)
def launcher_type(cache_dir: Path, driver: str = DRIVER) -> Callable[..., Callable[..., Any]] | None:
    """Return a constructor of launchers that use the driver library `driver`; None, logged, if they cannot be built.

    A launcher is called with tensors. The constructor takes, by keyword: `name`, for errors; `stages`, a tuple of
    (function in the driver, programs, threads, bytes of shared memory); `pointers`, the number of tensors; `scratch`, a
    tuple of (size, stride, dtype), each passed to `empty` to allocate a tensor; `data_ptr(tensor)`;
    `stream_of(device)`; `device`; and `otherwise`, called with the tensors if one is not aligned to 16 bytes or the
    current device is not the one that was current when the launcher was made.
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
    """Return a constructor of launchers for functions on the host; None, logged, if they cannot be built.

    A launcher is called with tensors, then sizes. The constructor takes, by keyword: `name`, for errors; `function`,
    the address of a function that takes an array of 8-byte words (addresses, sizes, threads) and returns the number of
    a check that failed, or 0; `pointers` and `sizes`, the numbers of tensors and sizes; `data_ptr(tensor)`;
    `threads()`, which returns the number of threads to use; `error`, raised with one of `messages`, a tuple, if a check
    failed.
    """
    module = _module(cache_dir)
    return None if module is None else module.HostLauncher


@lru_cache(None)
def _module(cache_dir: Path) -> ModuleType | None:
    try:
        return native_module("overlapc_launcher", Path(__file__).with_name("launcher.c"), cache_dir)
    except (ToolchainError, ImportError, OSError) as error:
        _log.info("kernels are launched from Python, at 1 to 2 us more each: %s", error)
        return None
