"""Check that Inductor is not used: its lowering, scheduler and kernel generators raise when they are called.

torch itself imports parts of `torch._inductor` (configuration, the partitioner's helpers), so its presence in
`sys.modules` says nothing.

    with no_inductor():
        torch.compile(model, backend="overlapc")(x)
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

# (module, class or None, function): whatever makes Inductor compile a graph calls at least one of these.
ENTRANCES = (
    ("torch._inductor.compile_fx", None, "compile_fx"),
    ("torch._inductor.compile_fx", None, "compile_fx_inner"),
    ("torch._inductor.graph", "GraphLowering", "__init__"),
    ("torch._inductor.graph", "GraphLowering", "run"),
    ("torch._inductor.scheduler", "Scheduler", "__init__"),
    ("torch._inductor.codegen.triton", "TritonKernel", "__init__"),
    ("torch._inductor.codegen.triton", "TritonScheduling", "__init__"),
    ("torch._inductor.codegen.cpp", "CppKernel", "__init__"),
    ("torch._inductor.codegen.cpp", "CppScheduling", "__init__"),
    ("torch._inductor.codegen.wrapper", "PythonWrapperCodegen", "__init__"),
)


class InductorUsed(BaseException):
    """An entry point of Inductor was called. Not an Exception, so that no `except Exception` on the way catches it."""


@contextlib.contextmanager
def no_inductor() -> Iterator[None]:
    """Make every function in ENTRANCES raise InductorUsed inside the block."""
    with contextlib.ExitStack() as stack:
        for module, owner, name in ENTRANCES:
            holder: Any = importlib.import_module(module)
            if owner is not None:
                holder = getattr(holder, owner)
            stack.enter_context(mock.patch.object(holder, name, _refuse(f"{module}.{owner or ''}.{name}")))
        yield


def _refuse(what: str) -> Any:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise InductorUsed(f"{what} was called")

    return refuse
