"""Find the C++ compiler, choose its flags, and make its errors readable; find Triton's version."""

from __future__ import annotations

import errno
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch

from overlapc.errors import ToolchainError

_FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-shared",
    "-fopenmp",
    # No -ffast-math: NaN, infinities and signed zeros must stay right. These two only say that no code reads errno or
    # the floating-point flags; without them floor, round and every libm call stay scalar.
    "-fno-math-errno",
    "-fno-trapping-math",
    # Round after each operation, as eager does, and alike in vectorized loops and their scalar tails.
    "-ffp-contract=off",
    "-fwrapv",  # integers wrap
    "-fno-strict-aliasing",  # views of another dtype
    "-nostdinc++",  # C headers only: parsing those of C++ takes longer than compiling a kernel
    "-w",  # generated code has unused names; users cannot do anything about warnings in it
)
# If GCC peeled iterations until a store is aligned, the address of a tensor would decide which elements go through the
# scalar code (and its math functions), and so results would depend on the allocator.
_GCC_FLAGS = ("--param", "vect-max-peeling-for-alignment=0")
# Kernels need neither the C++ library nor start files, and Python's process has the C library. A linker that does not
# read them takes 8 ms instead of 21, of 58 ms for a small kernel. Clang may have no libgcc.
_LITTLE_LINKED = ("-nostdlib", "-lgcc")


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler: its command, flags and libraries, and an identity for cache keys."""

    command: tuple[str, ...]
    flags: tuple[str, ...]
    libraries: tuple[str, ...]
    identity: str  # version and target CPU: part of every cache key

    def build(self, source: Path, library: Path) -> subprocess.CompletedProcess[str]:
        """Compile one file to a shared library; the caller checks `returncode` and `stderr`."""
        return subprocess.run(self.command_line(source, library), capture_output=True, text=True)

    def command_line(self, source: Path, library: Path) -> list[str]:
        """Return the command that compiles `source`."""
        return [*self.command, *self.flags, "-o", str(library), str(source), *self.libraries]


def find_compiler() -> Compiler:
    """Return the compiler that CXX names, else g++, else clang++; raise ToolchainError if there is none."""
    return _compiler(os.environ.get("CXX", ""), os.environ.get("PATH", ""))


@lru_cache(None)
def _compiler(wanted: str, path: str) -> Compiler:
    candidates = [shlex.split(wanted)] if wanted.strip() else [["g++"], ["clang++"]]
    for command in candidates:
        found = shutil.which(command[0], path=path)
        if found is not None:
            return _describe((found, *command[1:]))
    tried = ", ".join(command[0] for command in candidates)
    raise ToolchainError(
        f"no C++ compiler found (tried {tried}); install g++ (apt-get install g++), or set CXX, "
        "or compile with options={'native': False}"
    )


def _describe(command: tuple[str, ...]) -> Compiler:
    try:
        version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=60)
        target = subprocess.run(
            [*command, "-march=native", "-E", "-dM", "-x", "c++", os.devnull],
            capture_output=True,
            text=True,
            timeout=60,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"{shlex.join(command)} does not run as a C++ compiler: {error}") from None
    if version.returncode:
        why = version.stderr.strip() or f"--version exits with code {version.returncode}"
        raise ToolchainError(f"{shlex.join(command)} does not run as a C++ compiler: {why}")
    is_clang = "clang" in version.stdout.lower()
    flags = [*_FLAGS, "-march=native" if target.returncode == 0 else ""]
    if not is_clang:
        flags.extend(_GCC_FLAGS)
    if torch.backends.cpu.get_cpu_capability() == "AVX512":  # as torch's own kernels use here
        flags += ["-mprefer-vector-width=512", "-DVECTORS_OF_64_BYTES"]
    libraries = [_openmp_library(), *(["-lmvec"] if _has_libmvec() else []), "-lm"]
    if not is_clang:
        libraries = [libraries[0] or "-lgomp", *libraries[1:], *_LITTLE_LINKED]
    identity = "\n".join((version.stdout, target.stdout, torch.__version__))  # the macros name every CPU feature
    return Compiler(command, tuple(filter(None, flags)), tuple(filter(None, libraries)), identity)


def _has_libmvec() -> bool:
    return platform.machine() == "x86_64" and platform.libc_ver()[0] == "glibc"


def _openmp_library() -> str:
    """Return torch's own OpenMP runtime, so that there is one thread pool; "" if torch uses the compiler's."""
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*.so*"))
    bundled += sorted(Path(torch.__file__).parent.parent.glob("torch.libs/libgomp*.so*"))
    return str(bundled[0]) if bundled else ""


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def compile_error(command: list[str], stderr: str, source: Path) -> ToolchainError:
    """Return the error for generated code that does not compile; raise OSError if the cause is the disk."""
    for number in _NO_ROOM:
        if os.strerror(number) in stderr:
            raise OSError(number, os.strerror(number))
    if "File size limit exceeded" in stderr:  # a signal ended the linker
        raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))
    lines = [line for line in stderr.splitlines() if "error" in line.lower()] or stderr.splitlines()
    shown = "\n".join(f"   {line}" for line in lines[:5]) or "   (the compiler printed nothing)"
    return ToolchainError(
        f"the C++ compiler refused a kernel; source: {source}\n{shown}\ncommand: {shlex.join(command)}"
    )


def triton_version() -> str:
    """Return the version of the installed Triton package; "" if there is none."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("triton")
    except PackageNotFoundError:
        return ""
