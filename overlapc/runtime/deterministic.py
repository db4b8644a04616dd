"""Deterministic mode: the same schedule and the same bits, run after run.

On by `deterministic=True` (one compiled model) or `torch.use_deterministic_algorithms(True)` (the process). While such
a graph is compiled and while it runs, torch's own switch is on, so that every part only needs to check
`torch.are_deterministic_algorithms_enabled()`: nothing is measured on this machine to decide anything, nothing is
added up by atomics, and library calls take their deterministic forms or raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Turns torch's switch on if `wanted`, and restores it afterwards."""
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield
        return
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # we write all we read
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def deterministically(call: Callable[[list[Any]], Any], wanted: bool) -> Callable[[list[Any]], Any]:
    """`call` in deterministic mode; `call` itself if that is not `wanted`."""
    if not wanted:
        return call

    def run(args: list[Any]) -> Any:
        with deterministic(True):
            return call(args)

    run._boxed_call = True  # type: ignore[attr-defined] # AOTAutograd: it takes one list
    return run
