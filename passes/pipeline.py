"""The default passes. Importing this module registers all of them."""

from __future__ import annotations

from dataclasses import dataclass

from overlapc.passes import (
    bucket,
    fill_collectives,
    plan_overlap,
    polish,
    raise_collectives,
    raise_under_memory,
    share_launches,
    sink_under_memory,
    sink_waits,
)

FIRST = ("bucket",)  # later passes should see the collectives that will really run
FINER = ("bucket_finely",)  # instead, on the way that turned out best, if something is exposed on it still


@dataclass(frozen=True, slots=True)
class Way:
    """Passes in order, behind those of `first`; `margin` multiplies `Context.overlap_margin` on it."""

    passes: tuple[str, ...]
    margin: float = 1.0
    first: tuple[str, ...] = FIRST


COLLECTIVES = (
    "plan_overlap",  # gathers of parameters and reductions on their queue together
    "raise_under_memory",  # what depends on compute, and what the plan left exposed
    "sink_under_memory",  # after raising: reductions hide, in the order in which that takes the least memory
    "sink_waits",  # in what memory is left, waits move to their readers
)
WAYS = (  # ways.py says why there are several, and how many of them are tried
    Way(COLLECTIVES),
    Way(("fill_any_waits", *COLLECTIVES)),  # compute first: weight gradients under a scatter of tensor parallelism
    Way(COLLECTIVES, margin=2.0),  # further ahead, where collectives come in bursts
    Way(("fill_whole_waits", *COLLECTIVES)),
    Way(("fill_whole_waits", *COLLECTIVES), margin=2.0),
    Way(("fill_any_waits", *COLLECTIVES), margin=2.0),
)
ENDS = ("fill_collectives",)  # after each way: what is exposed still may be covered by compute that can move
LAST = ("polish",)  # after the best two of them: moves around what is exposed even so
# Once the order is chosen: ranks whose shards differ in size differ in what this does, and may not in anything before.
AFTER = ("share_launches",)
ORDER = (*FIRST, *WAYS[0].passes, *ENDS, *LAST, *AFTER)

__all__ = [
    "AFTER",
    "ENDS",
    "FINER",
    "FIRST",
    "LAST",
    "ORDER",
    "WAYS",
    "Way",
    "bucket",
    "fill_collectives",
    "plan_overlap",
    "polish",
    "raise_collectives",
    "raise_under_memory",
    "share_launches",
    "sink_under_memory",
    "sink_waits",
]
