"""Room on Python's stack for the calls within a function.

CPython (seen with 3.11 and 3.12) keeps the frames of Python functions in chunks of 16 KiB, each mapped from the
operating system when a call does not fit into the last one, and unmapped when that call returns. If the calls of a loop
happen to begin where a chunk ends, the loop maps and unmaps memory in each iteration: the same function then takes
several times as long, only because its caller was called from a deeper one. Compiling is made of such loops.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

# Slots of the frame, of 8 bytes each: 1 MiB. A chunk is the next larger power of two, 2 MiB, of which the frame touches
# only the first page. The rest, 1 MiB, is for the frames of calls, which take a few hundred bytes each.
_SLOTS = 1 << 17


def with_stack_room(function: Callable[P, R]) -> Callable[P, R]:
    """Return `function`, called from a frame so large that the calls within it need no other chunk."""

    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_SLOTS)
    return wraps(function)(call)


def has_stack_room(function: Callable[..., object]) -> bool:
    """Whether `with_stack_room` returned `function`."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_stacksize >= _SLOTS
