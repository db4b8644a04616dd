"""Counts in the place where users of torch look for them: `torch._dynamo.utils.counters["overlapc"]`."""

from __future__ import annotations

from torch._dynamo.utils import counters


def count(name: str, by: int = 1) -> None:
    """Adds to the counter `name` (`kernel_compiles`, `kernel_cache_hits`, …)."""
    counters["overlapc"][name] += by


def counted(name: str) -> int:
    """The counter's value in this process since it started or `torch._dynamo.reset` cleared it."""
    return counters["overlapc"][name]
