"""A recorder for CPUs: what was recorded runs again on the memory it was recorded with, into the first results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Repeated:
    """Like CUDA graphs in what it does to memory: fixed arguments, and results that the next replay overwrites."""

    def __init__(self) -> None:
        self.recorded = self.replays = self.restarts = 0
        self.others = False  # somebody else is recording

    def busy(self) -> bool:
        return self.others

    def record(
        self, function: Callable[[list[Any]], tuple[Any, ...]], given: Sequence[Tensor]
    ) -> tuple[Callable[[], None], tuple[Any, ...]]:
        self.recorded += 1
        before = [each.clone() for each in given]
        results = function(list(given))
        for each, kept in zip(given, before, strict=True):  # a capture runs nothing: no argument has changed
            each.copy_(kept)

        def again() -> None:
            self.replays += 1
            for kept, new in zip(results, function(list(given)), strict=True):
                if isinstance(kept, Tensor):
                    kept.copy_(new)

        return again, results

    def restart(self) -> None:
        self.restarts += 1
