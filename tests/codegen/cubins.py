"""Compiles generated Triton kernels for a GPU without needing one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from overlapc.runtime.triton_binary import explained, triton_module, wanted, write_module
from overlapc.runtime.triton_compile import compile_now
from overlapc.runtime.triton_kernel import Source, launch_of, usual_variant


def compile_source(source: Source, cache_dir: Path, capability: int = 90) -> list[Any]:
    """Return Triton's compiled kernel (`.asm`, `.metadata`) of every stage for an NVIDIA architecture."""
    triton_module()
    path = write_module(source, cache_dir)
    compiled = []
    for stage in launch_of(source).stages:
        what = wanted(source, stage, usual_variant(source), ("cuda", capability, 32), cache_dir).what
        with explained(source, stage.function, path):
            compiled.append(compile_now(what))
    return compiled
