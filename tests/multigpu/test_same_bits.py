"""On a GPU, a value that two kernels compute has equal bits in both, and gradients through comparisons are eager's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from overlapc.codegen.triton import TritonGenerator
from tests.codegen.same_bits import Bits, kernels
from tests.codegen.terms import bf16, f16, f32, f64
from tests.codegen.triton_forms import variants
from tests.comparisons import COMPARISONS, gradients_differ

pytestmark = [pytest.mark.gpu(1), pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("dtype", [f32, bf16, f16, f64], ids=str)
def test_triton_kernels_agree_to_the_last_bit(dtype: torch.dtype, tmp_path: Path):
    generator, bits = TritonGenerator(), Bits(dtype)
    few = dtype in (f16, f64)  # kernels of these dtypes compile slowly
    found = [
        (kernel, form, generator.generate(kernel.body, "kernel", tiling=tiling))
        for kernel in kernels(dtype)
        for form, tiling in (variants(kernel.body) if len(kernel.names) > 1 and not few else [("chosen", None)])
    ]
    launchers = generator.load(list({source.name: source for _, _, source in found}.values()), tmp_path)
    for kernel, form, source in found:
        tensors = kernel.tensors("cuda")
        sizes = [kernel.sizes[str(symbol)] for symbol in source.sizes]
        launchers[source.name](*(tensors[buffer] for buffer in source.buffers), *sizes)
        for name in kernel.names:
            bits.look_at(f"{kernel.shape}, {form}", name, tensors[f"out_{name}"])
    assert not bits.problems, "\n".join(bits.problems)


@pytest.mark.parametrize("dtype", [f32, f64, bf16, f16], ids=str)
def test_gradients_through_comparisons_are_eagers(dtype: torch.dtype):
    problems = [problem for name in COMPARISONS if (problem := gradients_differ(name, dtype, "cuda"))]
    assert not problems, "\n".join(problems)
