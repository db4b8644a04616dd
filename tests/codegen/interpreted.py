"""Triton's interpreter, and its generator for CPU tensors in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import triton

import overlapc.codegen.cpp  # noqa: F401 (registers the generator)
from overlapc.codegen import generators
from overlapc.codegen.triton import TritonGenerator


@contextmanager
def interpreting() -> Iterator[None]:
    """Kernels that are loaded meanwhile run in the interpreter, as with TRITON_INTERPRET=1."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        yield


class OnCpu(TritonGenerator):
    """Triton's kernels for CPU tensors."""

    device_type = "cpu"


@contextmanager
def triton_on_cpu(generator: TritonGenerator | None = None) -> Iterator[None]:
    """Kernels for the CPU are Triton's; the generator that was registered comes back."""
    cpp = generators.generator_for("cpu")
    generators.register(generator or OnCpu())
    try:
        with interpreting():
            yield
    finally:
        generators.register(cpp)
