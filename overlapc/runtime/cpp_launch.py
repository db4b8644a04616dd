"""Compile C++ kernels and make them callable.

Each kernel has its own cache entry, so that all graphs and ranks that contain it share it. Starting the compiler takes
longer than compiling a kernel (0.1 s against 0.01 s), so all kernels of a graph that are not cached are compiled
together, one file per core, and the entry of a kernel names the file whose library contains it.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from overlapc.errors import CheckFailed, ToolchainError
from overlapc.runtime.cache import KernelCache, content_key
from overlapc.runtime.counters import count
from overlapc.runtime.native_launcher import host_launcher_type
from overlapc.runtime.toolchain import Compiler, compile_error, find_compiler


@dataclass(frozen=True, slots=True)
class CppKernel:
    """One function to compile. `text` and `prelude` determine the cache key; `comment` only annotates the source."""

    name: str
    text: str
    tensors: int  # leading pointer arguments
    sizes: int  # int64 arguments after them; a thread count follows
    comment: str = ""
    messages: tuple[str, ...] = ()  # of its checks; a kernel with checks returns the number of a failed one, or 0
    prelude: str = ""  # comes before `text`, once in a file of several kernels

    def key(self, compiler: Compiler) -> str:
        """Return the cache key of the kernel."""
        return content_key(
            self.prelude + self.text, *compiler.command, *compiler.flags, *compiler.libraries, compiler.identity
        )


@lru_cache(None)
def _cache(root: Path) -> KernelCache:
    return KernelCache(root)


@lru_cache(None)
def _files(root: Path) -> KernelCache:
    """Return the cache of libraries of several kernels, keyed by their joined text."""
    return KernelCache(root, "files")


_FILE = ".file"  # suffix of a cached kernel's entry that contains the key of a file

# A kernel's second entry, for callers that know how many arguments it takes but not their types.
_ENTRY = """
struct Word { unsigned long long bits; template <class T> operator T() const { return (T)bits; } };
extern "C" int NAME_entry(const unsigned long long *words) { CALL }
"""


def with_entry(kernel: CppKernel) -> CppKernel:
    """Return `kernel` with an added `<name>_entry`, which takes the arguments as one array of 8-byte words."""
    arguments = ", ".join(f"Word{{words[{at}]}}" for at in range(kernel.tensors + kernel.sizes + 1))
    called = f"{kernel.name}({arguments});"
    call = f"return {called}" if kernel.messages else f"{called} return 0;"
    return replace(kernel, text=kernel.text + _ENTRY.replace("NAME", kernel.name).replace("CALL", call))


def launcher(kernel: CppKernel, library: Path, cache_dir: Path) -> Callable[..., None]:
    """Return `launch(*tensors, *sizes)`, which runs the kernel on the calling thread and torch's OpenMP threads.

    It raises CheckFailed, with the kernel and its origin, if a check of the kernel failed. The GIL is released while
    the kernel runs, so that gloo's Python-side callbacks and autograd threads continue.
    """
    entry = getattr(ctypes.CDLL(str(library)), f"{kernel.name}_entry")
    messages = tuple(f"{each}\n   in kernel {kernel.name}: {kernel.comment}" for each in kernel.messages)
    make = host_launcher_type(cache_dir)
    if make is not None:
        return make(
            name=kernel.name,
            function=ctypes.cast(entry, ctypes.c_void_p).value,
            pointers=kernel.tensors,
            sizes=kernel.sizes,
            data_ptr=torch.Tensor.data_ptr,
            threads=torch.get_num_threads,
            error=CheckFailed,
            messages=messages,
        )
    tensors, count = kernel.tensors, kernel.tensors + kernel.sizes + 1

    def launch(*args: Any) -> None:
        addresses = map(torch.Tensor.data_ptr, args[:tensors])
        failed = entry((ctypes.c_uint64 * count)(*addresses, *args[tensors:], torch.get_num_threads()))
        if failed:
            raise CheckFailed(messages[failed - 1])

    return launch


def load_kernels(kernels: Sequence[CppKernel], cache_dir: Path) -> dict[str, Callable[..., None]]:
    """Return a launcher for each kernel, by name; ToolchainError if there is no compiler or it rejects a source."""
    compiler = find_compiler()
    cache, files = _cache(Path(cache_dir)), _files(Path(cache_dir))
    unique = {kernel.name: with_entry(kernel) for kernel in kernels}
    workers = max(1, min(len(unique), len(os.sched_getaffinity(0))))

    def find(kernel: CppKernel) -> Path | None:
        key = kernel.key(compiler)
        file = cache.read(key, _FILE)
        return (file and files.find(file.decode(), ".so")) or cache.find(key, ".so")

    def obtain(kernel: CppKernel, library: Path | None) -> Path:
        return library or find(kernel) or build_library(kernel, cache, compiler)

    with ThreadPoolExecutor(workers, thread_name_prefix="overlapc-compile") as pool:
        pool.submit(host_launcher_type, cache_dir)  # compiled meanwhile, once per machine
        found = list(pool.map(find, unique.values()))
        missing = [kernel for kernel, library in zip(unique.values(), found, strict=True) if library is None]
        count("kernel_cache_hits", len(unique) - len(missing))
        groups = [missing[first::workers] for first in range(workers)]
        list(pool.map(lambda group: _build_together(group, cache, files, compiler), groups))
        libraries = pool.map(obtain, unique.values(), found)
        return {
            kernel.name: launcher(kernel, library, cache_dir)
            for kernel, library in zip(unique.values(), libraries, strict=True)
        }


def _build_together(kernels: Sequence[CppKernel], cache: KernelCache, files: KernelCache, compiler: Compiler) -> None:
    """Compile `kernels` by one run of the compiler into the cache; if that fails, `build_library` compiles each."""
    if len(kernels) < 2:
        return
    prelude = kernels[0].prelude
    assert all(kernel.prelude == prelude for kernel in kernels), "kernels of one graph have one prelude"
    # One namespace per kernel: helpers of two kernels may have the same name. The kernels themselves are `extern "C"`.
    texts = [f"namespace of_{kernel.name} {{\n{kernel.text}}}\n" for kernel in kernels]
    together = CppKernel(f"{len(kernels)} kernels", "".join(texts), 0, 0, prelude=prelude)
    try:
        build_library(together, files, compiler)
    except ToolchainError:
        return  # each is then compiled alone, and the error names the kernel at fault
    for kernel in kernels:
        cache.put(kernel.key(compiler), _FILE, together.key(compiler))


def build_library(kernel: CppKernel, cache: KernelCache, compiler: Compiler) -> Path:
    """Return the kernel's shared library, from the cache or compiled now."""

    def build(library: Path) -> None:
        # A line of the user's code may end with a backslash, which would extend the comment to the next line.
        comment = "".join(f"// {line}".rstrip("\\ \t") + "\n" for line in kernel.comment.splitlines())
        source = library.with_suffix(".cpp")
        source.write_text(comment + kernel.prelude + kernel.text)
        result = compiler.build(source, library)
        if result.returncode:
            kept = cache.keep_text(f"{kernel.name}.cpp", [comment, kernel.prelude, kernel.text])
            stderr = result.stderr.replace(str(source), str(kept))
            raise compile_error(compiler.command_line(kept, Path(f"{kernel.name}.so")), stderr, kept)

    return cache.get_or_build(kernel.key(compiler), ".so", build)
