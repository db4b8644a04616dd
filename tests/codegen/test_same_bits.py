"""A value that two kernels compute has the same bits in both, whatever else the kernels compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from overlapc.codegen.cpp import CppGenerator
from overlapc.codegen.triton import TritonGenerator
from tests.codegen.interpreted import interpreting
from tests.codegen.same_bits import Bits, kernels
from tests.codegen.terms import bf16, f16, f32, f64
from tests.codegen.triton_forms import variants


@pytest.mark.parametrize("dtype", [f32, f64, bf16, f16], ids=str)
def test_cpp_kernels_agree_bitwise(dtype: torch.dtype, tmp_path: Path):
    generator, found = CppGenerator(), list(kernels(dtype))
    sources = [generator.generate(kernel.body, "kernel") for kernel in found]
    launchers = generator.load(list({source.name: source for source in sources}.values()), tmp_path)
    bits = Bits(dtype)
    for kernel, source in zip(found, sources, strict=True):
        tensors = kernel.tensors("cpu")
        sizes = [kernel.sizes[str(symbol)] for symbol in source.sizes]
        launchers[source.name](*(tensors[buffer] for buffer in source.buffers), *sizes)
        for name in kernel.names:
            bits.look_at(kernel.shape, name, tensors[f"out_{name}"])
    assert not bits.problems, "\n".join(bits.problems)


@pytest.mark.parametrize("dtype", [f32, bf16], ids=str)
def test_interpreted_triton_kernels_agree_bitwise(dtype: torch.dtype, tmp_path: Path):
    generator, bits, shapes = TritonGenerator(), Bits(dtype), set()
    for kernel in kernels(dtype):
        first = kernel.shape not in shapes  # only one kernel of every shape in all forms: the interpreter is slow
        shapes.add(kernel.shape)
        for form, tiling in variants(kernel.body) if first else [("chosen", None)]:
            source = generator.generate(kernel.body, "kernel", tiling=tiling)
            with interpreting():
                launcher = generator.load([source], tmp_path)[source.name]
            tensors = kernel.tensors("cpu")
            sizes = [kernel.sizes[str(symbol)] for symbol in source.sizes]
            launcher(*(tensors[buffer] for buffer in source.buffers), *sizes)
            for name in kernel.names:
                bits.look_at(f"{kernel.shape}, {form}", name, tensors[f"out_{name}"])
    assert not bits.problems, "\n".join(bits.problems)
