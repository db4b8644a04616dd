"""Profiler marks around everything that a compiled graph launches; off unless a measurement runs.

The code of a graph is generated a second time with a mark around every node, and that version runs while marks are on:
when they are off, a call only checks a flag.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch.profiler import record_function

PREFIX = "overlapc/"
_COPYING = "overlapc copies "
_on = False


@dataclass(frozen=True, slots=True)
class Label:
    """The name of a mark: the node that it encloses, and how that is run."""

    graph: str
    how: str  # "launch" of a generated kernel, "call", "start" or "wait"
    node: str
    # Events of a start that a trace shows without saying whose they are: gloo's operations (a coalesced scatter is one
    # per tensor), copies to or from other GPUs, or the one of `copying`.
    works: int = 1
    queue: str = ""  # of a start by copies: the name of its queue, which runs them in order

    def __str__(self) -> str:
        """The mark's name in a trace: `overlapc/forward_0/launch/1/_to_copy_3`, or with `start@dp` in it."""
        return f"{PREFIX}{self.graph}/{self.how}{self.queue}/{self.works}/{self.node}"

    @classmethod
    def parse(cls, name: str) -> Label | None:
        """Return the label with that name; None for any other name in a trace."""
        parts = name.split("/", 4)
        if not name.startswith(PREFIX) or len(parts) != 5:
            return None
        _, graph, how, works, node = parts
        how, at, name = how.partition("@")
        return cls(graph, how, node, int(works), at + name)


mark = record_function


def copying(queue: str) -> AbstractContextManager[Any]:
    """Return a context manager that shows a collective's copies in a trace while marks are on; see `copied_by`."""
    return record_function(_COPYING + queue) if _on else contextlib.nullcontext()


def copied_by(name: str) -> str | None:
    """Return the queue whose copies an event of this name shows; None for other events."""
    return name.removeprefix(_COPYING) if name.startswith(_COPYING) else None


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Run compiled graphs with marks inside the block, on every thread of this process."""
    global _on
    before, _on = _on, True
    try:
        yield
    finally:
        _on = before


Call = Callable[[list[Any]], tuple[Any, ...]]


def switching(plain: Call, make_marked: Callable[[], Call], calls: list[int]) -> Call:
    """Return a function that runs `plain`, or the marked version while marks are on, which is made at its first use.

    Each call increments `calls[0]`.
    """
    made: list[Call] = []

    def call(args: list[Any]) -> tuple[Any, ...]:
        calls[0] += 1
        if not _on:
            return plain(args)
        if not made:
            made.append(make_marked())
        return made[0](args)

    return call
