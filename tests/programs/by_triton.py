"""Judge random programs with Triton kernels without a GPU: run them in the interpreter, and compile them for sm_90."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from overlapc.errors import ToolchainError
from overlapc.runtime.triton_kernel import Source
from tests.codegen.cubins import compile_source
from tests.codegen.interpreted import OnCpu, triton_on_cpu
from tests.programs.judge import Compile, Verdict, by_overlapc, judge
from tests.programs.program import Program


class Remembering(OnCpu):
    """A generator of Triton kernels for CPU tensors that records all sources."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Source] = []

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        source = super().generate(*args, **kwargs)
        self.sources.append(source)
        return source


def judge_triton(program: Program, device: str = "cpu", compiler: Compile = by_overlapc) -> Verdict:
    """Judge a program like `judge`, but with Triton kernels; a kernel that does not compile for a GPU is an error."""
    if compiler is not by_overlapc:
        return judge(program, device, compiler)
    generator = Remembering()
    with triton_on_cpu(generator):
        verdict = judge(program, device, compiler)
    with tempfile.TemporaryDirectory() as folder:
        for source in generator.sources:
            try:
                compile_source(source, Path(folder))
            except ToolchainError as error:
                return Verdict("error", f"for sm_90: {error}")
    return verdict
