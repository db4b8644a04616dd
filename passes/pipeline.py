"""The default order of passes. Importing this module registers all of them."""

from __future__ import annotations

from overlapc.passes import raise_collectives, raise_under_memory, sink_waits

ORDER = (
    "raise_under_memory",  # first: gathers take the memory that they need, soonest needed first
    "sink_waits",  # after raising: scatters hide in what memory is left, and waits move to their readers
)

__all__ = ["ORDER", "raise_collectives", "raise_under_memory", "sink_waits"]
