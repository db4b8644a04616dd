"""Triton kernels for CUDA devices; importing this registers the generator."""

from overlapc.codegen.triton.kernel import TritonGenerator

__all__ = ["TritonGenerator"]
