"""Pauses Python's garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

_before_compile: list[bool] = []  # whether collection was enabled before the compile that runs now
# Python 3.12 starts with 375 frozen objects. A user's `gc.freeze` adds over 100,000 once torch is imported.
_FROZEN_BY_A_USER = 10_000


@contextlib.contextmanager
def gc_paused() -> Iterator[None]:
    """Disable garbage collection inside the block: a collection scans all live objects and finds nothing to free while
    a graph is built."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            _enable()


def pause_while_compiling() -> None:
    """Disable garbage collection while Dynamo traces and compiles a frame, and while a backward is compiled late.

    Dynamo calls `_pause` and `_resume` for every backend, around the outermost of nested compiles.
    """
    from torch._dynamo.callback import callback_handler

    if _pause not in callback_handler.start_callbacks:  # `torch._dynamo.reset` removes both
        callback_handler.register_start_callback(_pause)
        callback_handler.register_end_callback(_resume)


def _pause(_: Any) -> None:
    _before_compile.append(gc.isenabled())
    gc.disable()


def _resume(_: Any) -> None:
    if _before_compile and _before_compile.pop():
        _enable()


def _enable() -> None:
    """Enable garbage collection after a pause. Most objects made meanwhile stay alive: they move to the oldest
    generation without the scans of all objects that a collection would make now, a tenth of a warm start."""
    if gc.get_freeze_count() < _FROZEN_BY_A_USER:
        gc.freeze()
        gc.unfreeze()
    gc.enable()
