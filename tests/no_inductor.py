"""Proof that Inductor does no work: its lowering, scheduler and kernel generators raise when they are used.

torch loads parts of `torch._inductor` by itself (configuration, the partitioner's helpers), so that its
absence from `sys.modules` would prove nothing.

    with no_inductor():
        torch.compile(model, backend="overlapc")(x)
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

# (module, class or None, function): every way from a graph to Inductor's code goes through some of these.
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
    """Not an Exception, so that nothing between here and the test swallows it."""


@contextlib.contextmanager
def no_inductor() -> Iterator[None]:
    """Until the block ends, InductorUsed rises from whatever calls one of ENTRANCES."""
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
