"""The default passes, in the order in which each runs once. Importing this module registers all passes of overlapc."""

from __future__ import annotations

from overlapc.passes import (  # noqa: F401
    bucket,
    fill_collectives,
    plan_overlap,
    raise_collectives,
    raise_under_memory,
    refine,
    share_launches,
    sink_under_memory,
    sink_waits,
)

ORDER = (
    "bucket",  # first: later passes should see the collectives that will really run
    "plan_overlap",  # gathers of parameters and reductions on their queue together
    "raise_under_memory",  # what depends on compute, and what the plan left exposed
    "sink_under_memory",  # after raising: reductions hide, in the order in which that takes the least memory
    "sink_waits",  # in what memory is left, waits move to their readers
    "refine",  # from there, whatever makes the step shorter: compute moves too
    # Last: ranks whose shards differ in size differ in what this does, and may not in anything before.
    "share_launches",
)
