"""Names around what a compiled graph launches, for the profiler; off unless a measurement runs.

A graph is printed a second time with a mark around every node, and that version runs while marks are on: without
them a call costs one look at a flag.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.profiler import record_function

PREFIX = "overlapc/"
_on = False


@dataclass(frozen=True, slots=True)
class Label:
    """Which node a mark is around, and how it is run."""

    graph: str
    how: str  # "launch" of a generated kernel, "call", "start" or "wait"
    node: str
    works: int = 1  # things that gloo does for a start: a coalesced scatter is one for each tensor

    def __str__(self) -> str:
        """The mark's name in a trace: `overlapc/forward_0/launch/1/_to_copy_3`."""
        return f"{PREFIX}{self.graph}/{self.how}/{self.works}/{self.node}"

    @classmethod
    def parse(cls, name: str) -> Label | None:
        """The label with that name; None for any other name in a trace."""
        parts = name.split("/", 4)
        if not name.startswith(PREFIX) or len(parts) != 5:
            return None
        _, graph, how, works, node = parts
        return cls(graph, how, node, int(works))


mark = record_function


@contextlib.contextmanager
def marked() -> Iterator[None]:
    """Within it compiled graphs run with marks, on every thread of this process."""
    global _on
    before, _on = _on, True
    try:
        yield
    finally:
        _on = before


Call = Callable[[list[Any]], tuple[Any, ...]]


def switching(plain: Call, make_marked: Callable[[], Call], calls: list[int]) -> Call:
    """`plain`, or the marked version while marks are on; that one is made at its first use.

    Each call adds to `calls`, which is one number.
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
