"""Compiles and loads generated C++ sources; separate from the generator because a warm start does not need that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from overlapc.codegen.generators import KernelSource, Launcher
from overlapc.fx.versions.tensors import float8_saturates
from overlapc.runtime.cpp_launch import CppKernel
from overlapc.runtime.cpp_launch import load_kernels as launchers_of


def load_kernels(sources: Sequence[KernelSource], cache_dir: Path) -> Mapping[str, Launcher]:
    """Compile all sources that are not cached, at once, and return a launcher per name. ToolchainError on failure."""
    kernels = [
        CppKernel(
            source.name,
            source.text,
            len(source.buffers),
            len(source.sizes),
            source.comment,
            source.launch or (),
            prelude(),
        )
        for source in sources
    ]
    return launchers_of(kernels, cache_dir)


@lru_cache(None)
def prelude() -> str:
    """Return `prelude.h` (functions that generated code calls), preceded by a macro that depends on torch's version."""
    end = "0x7f800000u" if float8_saturates() else "0x43e80000u"  # bits of infinity, or of 464
    return f"#define E4M3_END {end}\n" + (Path(__file__).parent / "cpp" / "prelude.h").read_text()
