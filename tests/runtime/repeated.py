"""A fake recorder of CUDA graphs for CPUs: a replay runs the function again on the recorded memory and overwrites the
first results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor


class Repeated:
    """Treats memory like CUDA graphs do: arguments are fixed, and each replay overwrites the results."""

    def __init__(self) -> None:
        self.recorded = self.replays = self.restarts = 0
        self.others = False  # whether other code is recording

    def busy(self) -> bool:
        return self.others

    def record(
        self, function: Callable[[list[Any]], tuple[Any, ...]], given: Sequence[Tensor]
    ) -> tuple[Callable[[], None], tuple[Any, ...]]:
        self.recorded += 1
        before = [each.clone() for each in given]
        results = function(list(given))
        for each, kept in zip(given, before, strict=True):  # a capture runs no kernel, so restore the arguments
            each.copy_(kept)

        def again() -> None:
            self.replays += 1
            for kept, new in zip(results, function(list(given)), strict=True):
                if isinstance(kept, Tensor):
                    kept.copy_(new)

        return again, results

    def restart(self) -> None:
        self.restarts += 1
