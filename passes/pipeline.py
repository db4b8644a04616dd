"""The default passes; each runs once, in this order. Importing this module registers all built-in passes."""

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
    "plan_overlap",  # places parameter gathers and the reductions on the same queue together
    "raise_under_memory",  # moves up starts that depend on compute, or that the plan left exposed
    "sink_under_memory",  # after raising: moves down waits of exposed reductions, in the order that takes least memory
    "sink_waits",  # moves waits to their readers, as far as the remaining memory allows
    "refine",  # local search from that order: any move that shortens the step, of compute nodes, too
    # Last: its result differs between ranks whose shards differ in size; all earlier passes must agree on all ranks.
    "share_launches",
)
