"""C++ kernels for the CPU; importing this registers their generator."""

from overlapc.codegen.cpp.kernel import CppGenerator

__all__ = ["CppGenerator"]
