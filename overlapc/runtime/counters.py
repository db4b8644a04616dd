"""Counters of overlapc, in torch's own table of counters: `torch._dynamo.utils.counters["overlapc"]`."""

from __future__ import annotations

from collections import Counter


def count(name: str, by: int = 1) -> None:
    """Add `by` to the counter `name` (`kernel_compiles`, `kernel_cache_hits`, …)."""
    _counters()[name] += by


def counted(name: str) -> int:
    """Return the counter's value in this process, since its start or the last `torch._dynamo.reset`."""
    return _counters()[name]


def _counters() -> Counter[str]:
    from torch._dynamo.utils import counters  # not at the top: `overlapc run` would import Dynamo, for a second

    return counters["overlapc"]
