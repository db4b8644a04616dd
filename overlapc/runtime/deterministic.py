"""Deterministic mode: the same schedule and the same bits, run after run.

`deterministic=True` turns it on for one compiled model, `torch.use_deterministic_algorithms(True)` for the process.
torch's own switch is on while a graph is compiled and while it runs, so all code only needs to check
`torch.are_deterministic_algorithms_enabled()`: then no decision depends on measurements, nothing is summed by atomics,
and library calls use their deterministic variants or raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Turn torch's switch on inside the block if `wanted`, and restore it afterwards."""
    if not wanted or torch.are_deterministic_algorithms_enabled():
        yield
        return
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined] # our kernels write all memory that they read
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def deterministically(call: Callable[[list[Any]], Any], wanted: bool) -> Callable[[list[Any]], Any]:
    """Return a function that runs `call` in deterministic mode, or `call` itself if that is not `wanted`."""
    if not wanted:
        return call

    def run(args: list[Any]) -> Any:
        with deterministic(True):
            return call(args)

    run._boxed_call = True  # type: ignore[attr-defined] # AOTAutograd: it takes one list
    return run
