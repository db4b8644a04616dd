"""Triton's interpreter, and Triton's generator registered for CPU tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import triton

import overlapc.codegen.cpp  # noqa: F401 (registers the generator)
from overlapc.codegen import generators
from overlapc.codegen.triton import TritonGenerator


@contextmanager
def interpreting() -> Iterator[None]:
    """Let kernels that are loaded inside the block run in the interpreter, as with TRITON_INTERPRET=1."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        yield


class OnCpu(TritonGenerator):
    """Triton's generator for CPU tensors."""

    device_type = "cpu"


@contextmanager
def triton_on_cpu(generator: TritonGenerator | None = None) -> Iterator[None]:
    """Use Triton's generator for the CPU inside the block, in place of the registered one."""
    cpp = generators.generator_for("cpu")
    generators.register(generator or OnCpu())
    try:
        with interpreting():
            yield
    finally:
        generators.register(cpp)
