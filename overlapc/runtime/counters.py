"""Counters of overlapc, in torch's own table of counters: `torch._dynamo.utils.counters["overlapc"]`."""

from __future__ import annotations

from torch._dynamo.utils import counters


def count(name: str, by: int = 1) -> None:
    """Add `by` to the counter `name` (`kernel_compiles`, `kernel_cache_hits`, …)."""
    counters["overlapc"][name] += by


def counted(name: str) -> int:
    """Return the counter's value in this process, since its start or the last `torch._dynamo.reset`."""
    return counters["overlapc"][name]
