"""Operators that torch cannot trace, such as one whose backward reads a number from a tensor.

Dynamo takes an operator as it is, and only AOTAutograd traces its backward. If that fails, the function that Dynamo
compiles runs eagerly, and Dynamo compiles the functions that it calls, as after a graph break. torch does the same for
other backends, but not for graphs with calls that a program allowed (`torch.compiler.allow_in_graph`), and the gathers
of a sharded module are such calls.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

import torch
from torch._dynamo.exc import SkipFrame, exceptions_allowed_to_be_fallback
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._subclasses.fake_tensor import DataDependentOutputException

from overlapc.errors import CompileError
from overlapc.runtime.counters import count

UNTRACEABLE: tuple[type[Exception], ...] = exceptions_allowed_to_be_fallback
_NOT_THEIRS = tuple(os.path.join(os.path.dirname(path), "") for path in (torch.__file__, os.path.dirname(__file__)))
_HINT = "compute this in an operator that has a fake version (torch.library.custom_op, register_fake)"


def graph_break(error: Exception, warn: Callable[[str], None]) -> Exception:
    """Return what a backend raises, after one of `UNTRACEABLE`, to make Dynamo run its present function eagerly.

    Where `fullgraph=True` forbids that, it is a CompileError.
    """
    if isinstance(error, DataDependentOutputException):
        what = f"{error.func}, whose result is a number read from a tensor"
    else:
        what = " ".join(str(error).split()) or type(error).__name__
    where = _user_line(error)
    why = f"torch cannot trace {what} ({where})" if where else f"torch cannot trace {what}"
    tx = InstructionTranslator.current_tx()
    if tx.one_graph or tx.error_on_graph_break:
        return CompileError(f"{why}, and fullgraph=True allows no graph break\nhint: {_HINT}")
    count("functions_left_to_eager")
    warn(
        f"{why}: the functions on the call stack down to this operator run eagerly, and overlapc compiles the other"
        f" functions that they call\nhint: {_HINT}"
    )
    return SkipFrame(why)


def _user_line(error: Exception) -> str:
    """Return the innermost line outside of torch and overlapc, as `moe.py:12: ends = offsets.tolist()`."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(_NOT_THEIRS)]
    return f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
