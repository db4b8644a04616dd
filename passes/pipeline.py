"""The default order of passes. Importing this module registers all of them."""

from __future__ import annotations

from overlapc.passes import bucket, fill_collectives, plan_overlap, raise_collectives, raise_under_memory, sink_waits

ORDER = (
    "bucket",  # first: later passes should see the collectives that will really run
    "plan_overlap",  # gathers of parameters and reductions on their queue together
    "raise_under_memory",  # what depends on compute, and what the plan left exposed
    "sink_waits",  # after raising: reductions hide in what memory is left, and waits move to their readers
)

__all__ = [
    "ORDER",
    "bucket",
    "fill_collectives",
    "plan_overlap",
    "raise_collectives",
    "raise_under_memory",
    "sink_waits",
]
